"""Ideal media tokens, made from the truth instead of pixels or sound: what a good tower and projector would hand the decoder.

A vision token is its patch's kind + the cell of the object it belongs to + how many of that kind there are + the background, all of
which the vision tower is taught for each patch; an audio token is its frame's word or
sound.  Kinds, colours, words and sounds are the decoder's own word embeddings.  Labels come with the mistakes a tower makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from scripts.tiny.projector import DECODER_WIDTH
from scripts.tiny.questions import KIND_NAMES, LOOKALIKES
from scripts.tiny.tokenizer import token_of
from scripts.tiny.world import CELLS, COLORS, FRAME_LABELS, GRID, PATCH_SIZE, Scene, Utterance

NUM_PATCHES = GRID * GRID
MAX_COUNT = 3
NOTHING = 0  # patch class; kind k of KIND_NAMES is k + 1
_COLOR_NAMES = tuple(COLORS)
_ALIKE = {k: [KIND_NAMES.index(o) + 1 for group in LOOKALIKES if k in group for o in group if o != k] for k in KIND_NAMES}
_axis = (np.arange(GRID) + 0.5) * PATCH_SIZE
_PATCH_Y, _PATCH_X = (a.reshape(-1).astype(np.float32) for a in np.meshgrid(_axis, _axis, indexing="ij"))


@dataclass(frozen=True, slots=True)
class PatchLabels:
    """One row for each patch that is kept; `other` is mixed in with weight `mix`, as a tower that isn't sure would."""

    positions: np.ndarray  # int64 [N], raster index of the patch
    kind: np.ndarray  # int64 [N], 0 is background
    other: np.ndarray  # int64 [N]
    mix: np.ndarray  # float32 [N]
    cell: np.ndarray  # int64 [N], 0 is none, else 1 + index into CELLS
    count: np.ndarray  # int64 [N], 0 is none, else how many of the kind are in the picture
    color: np.ndarray  # int64 [N]

    def at(self, rows: Sequence[int]) -> PatchLabels:
        names = ("positions", "kind", "other", "mix", "cell", "count", "color")
        return PatchLabels(*(getattr(self, name)[rows] for name in names))


@dataclass(frozen=True, slots=True)
class FrameLabels:
    """One row for each audio token; the same mixing."""

    label: np.ndarray  # int64 [N], index into FRAME_LABELS
    other: np.ndarray  # int64 [N]
    mix: np.ndarray  # float32 [N]


def true_patches(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """The thing that covers each patch (0 none, else 1 + its index), and how near its rim: int64, float32 [NUM_PATCHES]."""
    owner = np.zeros(NUM_PATCHES, dtype=np.int64)
    nearest = np.full(NUM_PATCHES, 9.0, dtype=np.float32)
    for index, thing in enumerate(scene.things):
        radius = 0.46 * thing.size
        distance = np.hypot(_PATCH_X - thing.center[0], _PATCH_Y - thing.center[1]) / radius
        closer = (distance < 1.0) & (distance < nearest)
        owner[closer], nearest[closer] = index + 1, distance[closer]
    return owner, nearest


def ideal_patches(scene: Scene) -> PatchLabels:
    """All patches, no mistakes."""
    owner, _ = true_patches(scene)
    kind, cell, count = _owned(scene)
    return PatchLabels(
        np.arange(NUM_PATCHES), kind[owner], np.zeros_like(owner), np.zeros(NUM_PATCHES, dtype=np.float32), cell[owner], count[owner],
        np.full(NUM_PATCHES, _COLOR_NAMES.index(scene.background)),
    )  # fmt: skip


def noisy_patches(rng: np.random.Generator, scene: Scene, num_kept: int) -> PatchLabels:
    """`num_kept` patches in raster order, a good part of them objects' when few are kept; up to 15 % of an object's mislabelled."""
    owner, rim = true_patches(scene)
    kept = np.sort(_choose(rng, owner, len(scene.things), num_kept))
    owner, rim = owner[kept], rim[kept]
    kinds, cells, counts = _owned(scene)
    kind, cell, count = kinds[owner], cells[owner], counts[owner]
    total = len(kept)
    other, mix = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.float32)
    for index, thing in enumerate(scene.things):
        confusers = _ALIKE[thing.kind] if _ALIKE[thing.kind] and rng.random() < 0.6 else range(1, len(KIND_NAMES) + 1)
        mine = np.flatnonzero(owner == index + 1)
        wrong = mine[rng.random(len(mine)) < rng.uniform(0.0, 0.15)]
        other[mine] = rng.choice(confusers)
        mix[mine] = rng.uniform(0.0, 0.25, len(mine)) * (rng.random() < 0.5)
        mix[wrong] = rng.uniform(0.4, 1.0, len(wrong))
        miscounted = mine[rng.random(len(mine)) < rng.uniform(0.0, 0.15)]
        count[miscounted] = rng.integers(1, MAX_COUNT + 1)
    blurred = (owner > 0) & (rim > 0.8) & (rng.random(total) < 0.5)
    other[blurred], mix[blurred] = NOTHING, rng.uniform(0.2, 1.0, int(blurred.sum()))
    if rng.random() < 0.4:  # a tower counts least well of all: cells must do
        count[:] = 0
    stray = (owner == 0) & (rng.random(total) < rng.uniform(0.0, 0.012))
    num_stray = int(stray.sum())
    other[stray], mix[stray] = rng.integers(1, len(KIND_NAMES) + 1, num_stray), rng.uniform(0.1, 0.6, num_stray)
    cell[stray] = rng.integers(1, len(CELLS) + 1, num_stray)
    count[stray] = rng.integers(1, MAX_COUNT + 1, num_stray)
    color = np.full(total, _COLOR_NAMES.index(scene.background))
    flipped = rng.random(total) < rng.uniform(0.0, 0.1)
    color[flipped] = rng.integers(0, len(_COLOR_NAMES))
    return PatchLabels(kept, kind, other, mix, cell, count, color)


def _owned(scene: Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kind, cell and count labels of nothing and of each thing."""
    things = scene.things
    kinds = np.array([NOTHING, *(KIND_NAMES.index(t.kind) + 1 for t in things)], dtype=np.int64)
    cells = np.array([0, *(t.cell + 1 for t in things)], dtype=np.int64)
    return kinds, cells, np.array([0, *(scene.count(t.kind) for t in things)], dtype=np.int64)


def _choose(rng: np.random.Generator, owner: np.ndarray, num_things: int, num_kept: int) -> np.ndarray:
    if num_kept >= NUM_PATCHES:
        return np.arange(NUM_PATCHES)
    order = rng.permutation(NUM_PATCHES)
    if num_kept > NUM_PATCHES // 2 or num_things == 0:
        return order[:num_kept]
    share = max(3, num_kept // (2 * num_things + 1))
    picked = [order[owner[order] == index + 1][:share] for index in range(num_things)]
    taken = np.concatenate(picked)
    rest = order[~np.isin(order, taken)]
    background_first = rest[np.argsort(owner[rest] > 0, kind="stable")]
    return np.concatenate([taken, background_first])[:num_kept]


def frame_labels(rng: np.random.Generator, clip: Utterance) -> tuple[FrameLabels, np.ndarray, int]:
    """Half or more of a clip's frames at 25 a second, their places, and how many frames there were.

    With silence around words, blurred borders and mislabelled frames.
    """
    names: list[int] = [0] * int(rng.integers(1, 22))
    spans = [FRAME_LABELS.index(word) for word in clip.words]
    if clip.sound is not None:
        names += [FRAME_LABELS.index(clip.sound)] * int(rng.integers(15, 60))
    pace = rng.uniform(0.7, 1.4)
    for span in spans:
        length = max(2.0, (1.2 + 1.3 * len(FRAME_LABELS[span])) * pace * rng.uniform(0.8, 1.25))
        names += [span] * int(length if len(spans) > 1 else length * 1.3)
        names += [0] * int(rng.integers(0, 2))
    names += [0] * int(rng.integers(1, 22))
    label = np.array(names, dtype=np.int64)
    total = len(label)
    other = np.roll(label, int(rng.choice((-1, 1))))
    mix = np.where(other != label, rng.uniform(0.0, 0.8, total), 0.0)
    wrong = rng.random(total) < rng.uniform(0.0, 0.2)
    confuser = np.where(rng.random(total) < 0.6, rng.integers(0, len(FRAME_LABELS)), rng.integers(0, len(FRAME_LABELS), total))
    other, mix = np.where(wrong, confuser, other), np.where(wrong, rng.uniform(0.3, 1.0, total), mix)
    kept = np.flatnonzero(rng.random(total) < rng.uniform(0.5, 1.0))
    return FrameLabels(label[kept], other[kept], mix[kept].astype(np.float32)), kept, total


class IdealTokens(nn.Module):
    """Labels -> rows in the decoder's embedding space.  Learned with the decoder, then what projectors are distilled to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.randn(1, DECODER_WIDTH) * 0.05)
        self.silence = nn.Parameter(torch.randn(1, DECODER_WIDTH) * 0.05)
        self.cell = nn.Parameter(torch.randn(len(CELLS) + 1, DECODER_WIDTH) * 0.05)
        self.count = nn.Parameter(torch.randn(MAX_COUNT + 1, DECODER_WIDTH) * 0.05)
        self.vision = nn.Parameter(torch.randn(1, DECODER_WIDTH) * 0.02)
        self.audio = nn.Parameter(torch.randn(1, DECODER_WIDTH) * 0.02)
        self._kinds = torch.tensor([token_of(tokenizer, kind) for kind in KIND_NAMES])
        self._colors = torch.tensor([token_of(tokenizer, color) for color in COLORS])
        self._frames = torch.tensor([token_of(tokenizer, word) for word in FRAME_LABELS[1:]])

    def vision_rows(self, words: torch.Tensor, labels: Sequence[PatchLabels], noise: float = 0.0) -> torch.Tensor:
        """[sum of N, DECODER_WIDTH]; `words` is the decoder's embedding matrix, `noise` is relative to a row's own size."""
        kind, other, cell, count, color = (_joined(labels, name) for name in ("kind", "other", "cell", "count", "color"))
        mix = _joined(labels, "mix")[:, None]
        table = torch.cat([self.nothing, words[self._kinds]])
        rows = (1 - mix) * table[kind] + mix * table[other]
        solid = torch.where((other == NOTHING)[:, None], 1 - mix, torch.where((kind == NOTHING)[:, None], mix, torch.ones_like(mix)))
        rows = rows + solid * (self.cell[cell] + self.count[count]) + 0.5 * words[self._colors][color] + self.vision
        return _with_noise(rows, noise)

    def audio_rows(self, words: torch.Tensor, labels: Sequence[FrameLabels], noise: float = 0.0) -> torch.Tensor:
        mix = _joined(labels, "mix")[:, None]
        table = torch.cat([self.silence, words[self._frames]])
        rows = (1 - mix) * table[_joined(labels, "label")] + mix * table[_joined(labels, "other")] + self.audio
        return _with_noise(rows, noise)


def _joined(labels: Sequence[PatchLabels] | Sequence[FrameLabels], name: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([getattr(one, name) for one in labels]))


def _with_noise(rows: torch.Tensor, noise: float) -> torch.Tensor:
    if noise == 0.0:
        return rows
    size = rows.detach().square().mean().sqrt()
    return rows + torch.randn_like(rows) * (noise * size)
