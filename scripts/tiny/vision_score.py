"""How well patch predictions tell what is in a picture: votes, centre flags, cells, counts.

Knows scenes and predicted labels; knows nothing of models or pixels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.tiny.render import KIND_INDEX, Rendered
from scripts.tiny.world import COLORS, GRID, PATCH_SIZE, Scene

MIN_VOTES = 8  # patches that must agree on a kind before it counts as seen
FLAG_THRESHOLD = 0.3  # a centre on the border of two patches gives each about a half
MAX_STRAY = 2.5  # patches between a thing's centre and the flag that may stand for it


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the linear heads read from one picture's patches."""

    classes: np.ndarray  # int [24, 24]
    backgrounds: np.ndarray  # int [24, 24]; index into COLORS
    rows: np.ndarray  # int [24, 24]
    columns: np.ndarray  # int [24, 24]
    offsets: np.ndarray  # float [24, 24, 2]
    flags: np.ndarray  # float [24, 24]; probability that the patch holds a centre
    cells: np.ndarray  # int [24, 24]
    counts: np.ndarray  # int [24, 24]; how many of the patch's kind the picture shows


@dataclass(frozen=True, slots=True)
class Blob:
    peak: tuple[int, int]  # row, column
    kind_index: int


def score(scenes: Sequence[Scene], truths: Sequence[Rendered], predictions: Sequence[Predicted]) -> dict[str, float]:
    """Shares in [0, 1]; per thing, per picture or per patch as the name says."""
    marks = _Marks()
    for scene, truth, predicted in zip(scenes, truths, predictions, strict=True):
        _mark_patches(marks, scene, truth, predicted)
        found = find_blobs(predicted)
        marks.add("stray_flags", _mark_things(marks, scene, truth, predicted, found))
        counted = Counter(blob.kind_index for blob in found)
        marks.add("count", *[counted[KIND_INDEX[k]] == scene.count(k) for k in scene.kinds])
        votes = Counter(predicted.classes.ravel().tolist())
        seen = {k for k, n in votes.items() if k and n >= MIN_VOTES}
        marks.add("kinds", seen == {KIND_INDEX[k] for k in scene.kinds})
    return marks.means()


class _Marks:
    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, *values: float | np.floating[Any] | np.bool_) -> None:
        self._values.setdefault(name, []).extend(float(v) for v in values)

    def means(self) -> dict[str, float]:
        return {name: float(np.mean(values)) for name, values in self._values.items()}


def _mark_patches(marks: _Marks, scene: Scene, truth: Rendered, predicted: Predicted) -> None:
    is_object = truth.classes > 0
    named_right = predicted.classes == truth.classes
    background_right = predicted.backgrounds == list(COLORS).index(scene.background)
    marks.add("patch_class", named_right[is_object].mean())
    marks.add("patch_nothing", named_right[~is_object].mean())
    marks.add("patch_background", background_right.mean())
    marks.add("patch_background_on_things", background_right[is_object].mean())
    marks.add("background", background_right.mean() > 0.5)
    marks.add("patch_row", (predicted.rows == np.arange(GRID)[:, None]).mean())
    marks.add("patch_column", (predicted.columns == np.arange(GRID)).mean())
    marks.add("patch_cell", (predicted.cells == truth.cells)[is_object].mean())
    marks.add("patch_offset_error", np.abs(predicted.offsets - truth.offsets)[is_object].mean())
    for kind in scene.kinds:
        marks.add("patch_count", (predicted.counts[truth.classes == KIND_INDEX[kind]] == scene.count(kind)).mean())


def _mark_things(marks: _Marks, scene: Scene, truth: Rendered, predicted: Predicted, found: list[Blob]) -> int:
    """Mark vote, flag and cell of every thing; return the flags that stand for none."""
    rows_columns = np.indices((GRID, GRID)).transpose(1, 2, 0) + 0.5
    owned_by: dict[int, list[Blob]] = {i: [] for i in range(len(scene.things))}
    centers = [np.array(thing.center)[::-1] / PATCH_SIZE for thing in scene.things]
    num_stray = 0
    for blob in found:
        distances = [np.linalg.norm(np.array(blob.peak) + 0.5 - center) for center in centers]
        nearest = int(np.argmin(distances))
        if distances[nearest] <= MAX_STRAY:
            owned_by[nearest].append(blob)
        else:
            num_stray += 1
    for index, (thing, center) in enumerate(zip(scene.things, centers, strict=True)):
        implied = rows_columns + truth.offsets[..., ::-1]
        mine = (truth.classes == KIND_INDEX[thing.kind]) & (np.abs(implied - center).max(axis=-1) < 0.01)
        marks.add("vote", np.bincount(predicted.classes[mine]).argmax() == KIND_INDEX[thing.kind])
        marks.add("flag", len(owned_by[index]) == 1)
        if owned_by[index]:
            row, column = owned_by[index][0].peak
            marks.add("cell", row // (GRID // 3) * 3 + column // (GRID // 3) == thing.cell)
    return num_stray


def find_blobs(predicted: Predicted) -> list[Blob]:
    """Groups of touching flagged patches (eight neighbours), each with its strongest patch and that patch's class."""
    waiting = {(int(r), int(c)) for r, c in np.argwhere(predicted.flags > FLAG_THRESHOLD)}
    blobs = []
    while waiting:
        group, edge = [], [waiting.pop()]
        while edge:
            row, column = edge.pop()
            group.append((row, column))
            near = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & waiting
            waiting -= near
            edge.extend(near)
        peak = max(group, key=lambda patch: float(predicted.flags[patch]))
        blobs.append(Blob(peak, int(predicted.classes[peak])))
    return blobs
