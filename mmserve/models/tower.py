"""What the encoder worker asks of every tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch


class TowerItem(NamedTuple):
    """One window's features, and the rows that were reserved for it."""

    features: torch.Tensor  # uint8 RGB [tiles, height, width, 3], or float32 samples [n]
    num_rows: int
    picture_size: tuple[int, int] | None = None  # width and height of the upright picture, before it was cut into tiles


class Tower(Protocol):
    def blank(self) -> TowerItem:
        """A made-up item, for the warm-up."""

    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        """[num_rows, H] each, projected for `decoder`.  Raises ValueError if an item would not give the rows reserved for it."""


def check_counts(clips: Sequence[TowerItem], num_rows: Callable[[int], int], longest: int | None = None) -> None:
    """Raises ValueError unless each clip, of at most `longest` samples, gives the rows reserved for it."""
    lengths = [len(clip.features) for clip in clips]
    reserved = [clip.num_rows for clip in clips]
    if [num_rows(length) for length in lengths] != reserved or (longest is not None and max(lengths) > longest):
        raise ValueError(f"windows of {lengths} samples for {reserved} rows reserved")
