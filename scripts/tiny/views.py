"""What the vision tower is shown: scenes rendered into a pool, cut into views, with a label for everything a patch should know."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from scripts.tiny.render import Rendered, render
from scripts.tiny.world import COLORS, GRID, KINDS, PATCH_SIZE, Scene, sample_scene

NUM_PATCHES = GRID * GRID
HELD_OUT_SEED = 2**30  # training seeds stay below
WINDOW_SIDE = 8  # patches
NUM_KEPT = 200  # patches left of a picture in a dropped view
Cut = Literal["window", "dropped", "whole"]


@dataclass
class Pool:
    """Rendered training scenes, the oldest replaced first.  Seeds count up, so no scene is drawn twice."""

    size: int
    next_seed: int
    patches: np.ndarray = field(init=False)  # uint8 [size, 576, 588]
    labels: dict[str, np.ndarray] = field(init=False)  # [size, 576, ...]
    num_drawn: int = 0

    def __post_init__(self) -> None:
        self.patches = np.empty((self.size, NUM_PATCHES, 3 * PATCH_SIZE**2), np.uint8)
        self.labels = {
            name: np.empty((self.size, NUM_PATCHES), np.int64) for name in ("classes", "backgrounds", "flags", "cells", "counts")
        }
        self.labels["offsets"] = np.empty((self.size, NUM_PATCHES, 2), np.float32)

    @property
    def num_ready(self) -> int:
        return min(self.num_drawn, self.size)

    def draw(self, count: int) -> None:
        for _ in range(count):
            rng = random.Random(self.next_seed)
            kinds = tuple(rng.sample(tuple(KINDS), rng.choice((1, 2))))
            scene = sample_scene(rng, kinds)
            self._put(self.num_drawn % self.size, scene, render(scene, augment=rng.random() < 0.7))
            self.num_drawn += 1
            self.next_seed += 1
            assert self.next_seed < HELD_OUT_SEED

    def _put(self, slot: int, scene: Scene, truth: Rendered) -> None:
        self.patches[slot] = to_patches(truth.image)
        for name, values in labels_of(scene, truth).items():
            self.labels[name][slot] = values


def to_patches(image: np.ndarray) -> np.ndarray:
    """uint8 [336, 336, 3] -> [576, 588], each patch in (channel, row, column) order like the convolution's weight."""
    blocks = image.reshape(GRID, PATCH_SIZE, GRID, PATCH_SIZE, 3)
    return blocks.transpose(0, 2, 4, 1, 3).reshape(NUM_PATCHES, -1)


def labels_of(scene: Scene, truth: Rendered) -> dict[str, np.ndarray]:
    """Each label per patch, [576, ...]; -1 where a label says nothing."""
    kinds = list(KINDS)
    counts = np.array([-1, *(scene.count(kind) - 1 for kind in kinds)])
    return {
        "classes": truth.classes.ravel(),
        "backgrounds": np.full(NUM_PATCHES, list(COLORS).index(scene.background)),
        "offsets": truth.offsets.reshape(NUM_PATCHES, 2),
        "flags": truth.centers.ravel(),
        "cells": truth.cells.ravel(),
        "counts": counts[truth.classes.ravel()],
    }


def cut_views(pool: Pool, cut: Cut, batch_size: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Patches uint8 [N, T, 588], positions int64 [N, T] and labels [N, T, ...] of a batch."""
    scenes = rng.integers(pool.num_ready, size=batch_size)
    if cut == "whole":
        positions = np.tile(np.arange(NUM_PATCHES), (batch_size, 1))
    elif cut == "window":
        positions = np.stack([_window(pool.labels["flags"][scene], rng) for scene in scenes])
    else:
        # Patches of things are kept a little more often: they carry most of the lesson.
        lot = rng.random((batch_size, NUM_PATCHES)) + 0.25 * (pool.labels["classes"][scenes] > 0)
        positions = np.argsort(-lot, axis=1)[:, :NUM_KEPT]
    picked = scenes[:, None], positions
    labels = {name: torch.from_numpy(values[picked]) for name, values in pool.labels.items()}
    if cut == "window":
        labels["counts"].fill_(-1)  # a window does not show them all
    rows, columns = np.divmod(positions, GRID)
    labels |= {"rows": torch.from_numpy(rows), "columns": torch.from_numpy(columns)}
    return torch.from_numpy(pool.patches[picked]), torch.from_numpy(np.ascontiguousarray(positions)), labels


def _window(flags: np.ndarray, rng: np.random.Generator, side: int = WINDOW_SIDE) -> np.ndarray:
    """Positions of a square of patches that, nine times in ten, holds some thing's centre."""
    row, column = rng.integers(GRID - side + 1, size=2)
    if rng.random() < 0.9:
        center = divmod(int(rng.choice(np.flatnonzero(flags))), GRID)
        row, column = (min(max(v - int(rng.integers(side)), 0), GRID - side) for v in center)
    return (np.arange(row, row + side)[:, None] * GRID + np.arange(column, column + side)).ravel()
