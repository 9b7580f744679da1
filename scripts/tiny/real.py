"""Pools of what the finished towers make of rendered scenes and spoken clips, and rows drawn from them.

A tower is frozen by now, so each picture and clip is encoded once and kept on disk.  Training and held-out pools draw from seeds and
voices that never meet.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.progress import track

from scripts.tiny import audio, vision
from scripts.tiny.audio_score import HELD_OUT_SEED
from scripts.tiny.clips import make_clip
from scripts.tiny.render import render
from scripts.tiny.rows import Slot
from scripts.tiny.speak import every_utterance
from scripts.tiny.symbolic import NUM_PATCHES, FrameLabels, PatchLabels
from scripts.tiny.world import COLORS, KINDS, Scene, Utterance, sample_scene

NUM_SCENES, NUM_HELD_OUT = 20_000, 200
CLIPS_PER_UTTERANCE = 40
_CHUNK = 100  # scenes to a file
_VISION_SEED, _AUDIO_SEED = 500_000_000, 600_000_000
_HELD_OUT_OFFSET = 200_000  # past the seeds the towers are scored on
_COLOR_NAMES = tuple(COLORS)


@dataclass(frozen=True, slots=True)
class RealPatches:
    index: int  # of the scene in its pool
    positions: np.ndarray  # int64 [N]


@dataclass(frozen=True, slots=True)
class RealFrames:
    index: int  # of the clip in its pool
    positions: np.ndarray  # int64 [N]


@dataclass(frozen=True, slots=True)
class VisionPool:
    scenes: tuple[Scene, ...]
    features: np.ndarray  # float16 [S, 576, 128]
    classes: np.ndarray  # int8 [S, 576], 0 is background
    cells: np.ndarray  # int8 [S, 576], -1 on background

    def labels(self, index: int) -> PatchLabels:
        """The ideal token of every patch, by what was drawn."""
        scene, kind = self.scenes[index], self.classes[index].astype(np.int64)
        counts = np.array([0, *(scene.count(k) for k in KINDS)], dtype=np.int64)
        return PatchLabels(
            np.arange(NUM_PATCHES), kind, np.zeros_like(kind), np.zeros(NUM_PATCHES, dtype=np.float32),
            self.cells[index].astype(np.int64) + 1, counts[kind], np.full(NUM_PATCHES, _COLOR_NAMES.index(scene.background)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AudioPool:
    utterances: tuple[Utterance, ...]  # of each clip
    features: tuple[np.ndarray, ...]  # float16 [n, 128] of each clip
    frames: tuple[np.ndarray, ...]  # int64 [n] of each clip, index into FRAME_LABELS
    of: dict[Utterance, tuple[int, ...]]

    def labels(self, index: int) -> FrameLabels:
        label = self.frames[index]
        return FrameLabels(label, np.zeros_like(label), np.zeros(len(label), dtype=np.float32))


def vision_pool(tower_dir: Path, cache_dir: Path, num_scenes: int, *, held_out: bool = False) -> VisionPool:
    """Rendered and encoded scenes; four in ten show the wear of pictures from outside."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    first = HELD_OUT_SEED + _HELD_OUT_OFFSET if held_out else _VISION_SEED
    tower = vision.load(tower_dir)
    chunks, scenes = [], []
    for start in track(range(0, num_scenes, _CHUNK), description="pictures", disable=False):
        seeds = range(first + start, first + start + _CHUNK)
        drawn = [sample_scene(random.Random(seed)) for seed in seeds]
        path = cache_dir / f"vision-{first + start}.npz"
        if not path.exists():
            np.savez(path.with_suffix(".new.npz"), **_encode_scenes(tower, drawn, first + start))
            path.with_suffix(".new.npz").replace(path)
        chunks.append(np.load(path))
        scenes += drawn
    joined = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in ("features", "classes", "cells")}
    return VisionPool(tuple(scenes), **joined)


@torch.inference_mode()
def _encode_scenes(tower: torch.nn.Module, scenes: Sequence[Scene], seed: int) -> dict[str, np.ndarray]:
    rng = random.Random(seed)
    drawn = [render(scene, augment=rng.random() < 0.4) for scene in scenes]
    features = [vision.features(tower, np.stack([r.image for r in drawn[i : i + 5]])) for i in range(0, len(drawn), 5)]
    return {
        "features": torch.cat(features).half().numpy(),
        "classes": np.stack([r.classes.reshape(-1) for r in drawn]),
        "cells": np.stack([r.cells.reshape(-1) for r in drawn]),
    }


def audio_pool(tower_dir: Path, cache_dir: Path, per_utterance: int, *, held_out: bool = False) -> AudioPool:
    """Spoken and encoded clips; single words and sounds more often than each of the many questions with a noun."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = cache_dir / f"audio-{'held-out' if held_out else 'train'}-{per_utterance}.npz"
    utterances = [u for u in every_utterance() for _ in range(per_utterance * _repeats(u))]
    if not path.exists():
        np.savez(path.with_suffix(".new.npz"), **_encode_clips(audio.load(tower_dir), utterances, held_out))
        path.with_suffix(".new.npz").replace(path)
    kept = np.load(path)
    borders = np.cumsum(kept["lengths"])[:-1]
    of: dict[Utterance, list[int]] = defaultdict(list)
    for index, utterance in enumerate(utterances):
        of[utterance].append(index)
    return AudioPool(
        tuple(utterances),
        tuple(np.split(kept["features"], borders)),
        tuple(np.split(kept["frames"], borders)),
        {utterance: tuple(indices) for utterance, indices in of.items()},
    )


def _repeats(utterance: Utterance) -> int:
    if utterance.sound is not None or not {*utterance.words} & {"there", "the", "are"}:
        return 4 if utterance.sound is not None else 2
    return 8 if utterance.words in (("what", "is", "in", "the", "picture"), ("what", "color", "is", "the", "background")) else 1


@torch.inference_mode()
def _encode_clips(tower: torch.nn.Module, utterances: Sequence[Utterance], held_out: bool) -> dict[str, np.ndarray]:
    first = HELD_OUT_SEED + _HELD_OUT_OFFSET if held_out else _AUDIO_SEED
    features, frames = [], []
    for start in track(range(0, len(utterances), 16), description="clips"):
        some = enumerate(utterances[start : start + 16], start=first + start)
        clips = [make_clip(utterance, random.Random(seed), held_out=held_out) for seed, utterance in some]
        features += [rows.half().numpy() for rows in audio.features(tower, [clip.waveform for clip in clips])]
        frames += [clip.labels for clip in clips]
    return {
        "features": np.concatenate(features),
        "frames": np.concatenate(frames),
        "lengths": np.array([len(rows) for rows in features]),
    }


class RealSource:
    """Rows from the pools; with fewer than all patches of a picture, a part of a clip's frames too."""

    def __init__(self, pictures: VisionPool, clips: AudioPool, num_patches: tuple[int, int]) -> None:
        self._pictures, self._clips, self._num_patches = pictures, clips, num_patches

    def scene(self, rng: random.Random) -> tuple[Scene, Slot]:
        index = rng.randrange(len(self._pictures.scenes))
        num_kept = rng.randint(*self._num_patches)
        positions = np.arange(NUM_PATCHES)
        if num_kept < NUM_PATCHES:
            positions = np.array(sorted(rng.sample(range(NUM_PATCHES), num_kept)))
        return self._pictures.scenes[index], Slot(positions, NUM_PATCHES, RealPatches(index, positions), is_image=True)

    def clip(self, rng: random.Random, utterance: Utterance) -> Slot:
        index = rng.choice(self._clips.of[utterance])
        length = len(self._clips.frames[index])
        positions = np.arange(length)
        if self._num_patches[1] < NUM_PATCHES:
            share = rng.uniform(0.6, 1.0)
            positions = np.array([i for i in range(length) if rng.random() < share], dtype=np.int64)
        return Slot(positions, length, RealFrames(index, positions), is_image=False)

    def vision_features(self, payloads: Sequence[RealPatches]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([self._pictures.features[p.index][p.positions] for p in payloads])).float()

    def audio_features(self, payloads: Sequence[RealFrames]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([self._clips.features[p.index][p.positions] for p in payloads])).float()


def train_pools(vision_dir: Path, audio_dir: Path, cache_dir: Path) -> tuple[VisionPool, AudioPool]:
    return vision_pool(vision_dir, cache_dir, NUM_SCENES), audio_pool(audio_dir, cache_dir, CLIPS_PER_UTTERANCE)


def held_out_pools(vision_dir: Path, audio_dir: Path, cache_dir: Path) -> tuple[VisionPool, AudioPool]:
    return vision_pool(vision_dir, cache_dir, NUM_HELD_OUT, held_out=True), audio_pool(audio_dir, cache_dir, 1, held_out=True)


def main() -> None:
    """Fill the cache for the towers that are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vision", type=Path)
    parser.add_argument("--audio", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.vision is not None:
        vision_pool(options.vision, options.cache, NUM_SCENES)
        vision_pool(options.vision, options.cache, NUM_HELD_OUT, held_out=True)
    if options.audio is not None:
        audio_pool(options.audio, options.cache, CLIPS_PER_UTTERANCE)
        audio_pool(options.audio, options.cache, 1, held_out=True)


if __name__ == "__main__":
    main()
