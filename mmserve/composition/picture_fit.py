"""How a picture of any size becomes what a tower takes, and how many rows come of it.  Arithmetic only: `encoders.image` moves the pixels.

Sizes are those of the upright picture, width first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

FeatureShape = tuple[int, int, int, int]  # tiles, height, width, 3


class PictureFit(Protocol):
    """Hashable and picklable; its repr names everything that shapes the pixels."""

    def feature_shape(self, width: int, height: int) -> FeatureShape: ...

    def num_rows(self, width: int, height: int) -> int: ...


class TileFit(PictureFit, Protocol):
    """For towers of one input size."""

    @property
    def side(self) -> int:
        """Pixels of a tile, both sides."""

    @property
    def rows_per_tile(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """Any aspect is resized (bicubic) to one square."""

    side: int  # pixels
    rows_per_tile: int

    def feature_shape(self, width: int, height: int) -> FeatureShape:
        return (1, self.side, self.side, 3)

    def num_rows(self, width: int, height: int) -> int:
        return self.rows_per_tile


@dataclass(frozen=True, slots=True)
class ResizeAndCrop:
    """`CLIPImageProcessor`'s way: resize, then cut the middle out; where the picture is smaller than the cut, black is added."""

    side: int  # pixels of the square that comes out
    rows_per_tile: int
    resize: int | tuple[int, int] | None  # the shorter edge, or (width, height), or not at all
    crop: bool
    resample: int = 3  # Pillow's number: 3 is bicubic

    def feature_shape(self, width: int, height: int) -> FeatureShape:
        return (1, self.side, self.side, 3)

    def num_rows(self, width: int, height: int) -> int:
        return self.rows_per_tile

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height before the cut."""
        if not isinstance(self.resize, int):
            return self.resize or (width, height)
        longer = int(self.resize * max(width, height) / min(width, height))
        return (self.resize, longer) if width <= height else (longer, self.resize)


@dataclass(frozen=True, slots=True)
class SmartResize:
    """Qwen2-VL's way: any size within bounds, both sides whole numbers of rows.  (Roundings as in its processor in transformers.)"""

    row_side: int  # pixels of a row's square
    min_pixels: int
    max_pixels: int
    resample: int = 3

    def feature_shape(self, width: int, height: int) -> FeatureShape:
        across, down = self.resized(width, height)
        return (1, down, across, 3)

    def num_rows(self, width: int, height: int) -> int:
        down, across = self.grid(width, height)
        return down * across

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows down and across."""
        resized = self.resized(width, height)
        return resized[1] // self.row_side, resized[0] // self.row_side

    def resized(self, width: int, height: int) -> tuple[int, int]:
        side = self.row_side
        whole = round(width / side) * side, round(height / side) * side
        if whole[0] * whole[1] > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            return max(side, math.floor(width / shrink / side) * side), max(side, math.floor(height / shrink / side) * side)
        if whole[0] * whole[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            return math.ceil(width * grow / side) * side, math.ceil(height * grow / side) * side
        return whole


@dataclass(frozen=True, slots=True)
class AnyRes:
    """LLaVA-NeXT's way: the whole picture as one tile, then the tiles of the canvas, out of several, that shows most of it.

    The picture is fitted into the canvas and centred on black.  Rows of patches that show nothing but black are left out again, and each
    row that stays ends with one newline row.  (The sizes follow the `LlavaNextProcessor` of transformers, roundings included.)
    """

    side: int  # pixels of a tile
    patches: int  # of a tile's side: a tile is patches * patches rows
    canvases: tuple[tuple[int, int], ...]  # (width, height), multiples of `side`
    resample: int = 3

    @property
    def rows_per_tile(self) -> int:
        return self.patches**2

    def feature_shape(self, width: int, height: int) -> FeatureShape:
        across, down = self.grid(width, height)
        return (1 + across * down, self.side, self.side, 3)

    def num_rows(self, width: int, height: int) -> int:
        top, bottom, left, right = self.shown(width, height)
        return self.rows_per_tile + (bottom - top) * (right - left + 1)

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """The canvas that keeps most pixels of the picture; among equals the one with the least black, then the first."""

        def merit(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[0] / width, canvas[1] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - canvas[0] * canvas[1]

        return max(self.canvases, key=merit)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Tiles across and down."""
        across, down = self.canvas(width, height)
        return across // self.side, down // self.side

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the picture on its canvas."""
        across, down = self.canvas(width, height)
        if across / width < down / height:
            return across, min(math.ceil(height * (across / width)), down)
        return min(math.ceil(width * (down / height)), across), down

    def shown(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Patches [top, bottom) x [left, right) of the canvas that are kept."""
        across, down = (tiles * self.patches for tiles in self.grid(width, height))
        if width / height > across / down:
            black = (down - int(round(height * (across / width), 7))) // 2
            return black, down - black, 0, across
        black = (across - int(round(width * (down / height), 7))) // 2
        return 0, down, black, across - black
