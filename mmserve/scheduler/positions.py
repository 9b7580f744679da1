"""Rotary positions: how far along a token is, on each of the axes that a decoder turns its heads by.  Pure.

Words and sound go on by one, on all axes alike.  The rows of a picture with a grid share one position in time and lie on two axes of
their own, down and across; what follows goes on behind the largest of all.  (Qwen2-VL, section 2.1, "M-RoPE".)

A position follows from the spans before it and the grid of its own, and those from the keys: tokens whose hash chains are equal have
equal positions, so the prefix cache may share them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence as Spans

import numpy as np

from mmserve.media import MediaSpan


def has_grids(spans: Spans[MediaSpan]) -> bool:
    return any(span.grid is not None for span in spans)


def position_shift(spans: Spans[MediaSpan]) -> int:
    """From the index of a token behind all spans to its position: never above zero."""
    return sum(_shift(span) for span in spans)


def positions_between(spans: Spans[MediaSpan], start: int, stop: int) -> np.ndarray:
    """int32 [3, stop - start]: time, down and across of the tokens [start, stop)."""
    positions = np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
    shift = 0
    for span in spans:
        if span.grid is None:
            continue
        first, last = max(span.start, start), min(span.stop, stop)
        if first < last:
            rows = np.arange(first - span.start, last - span.start)
            down, across = np.divmod(rows, span.grid[1])
            positions[:, first - start : last - start] = span.start + shift + np.stack([np.zeros_like(rows), down, across])
        shift += _shift(span)
        positions[:, max(span.stop - start, 0) :] += _shift(span)
    return positions


def _shift(span: MediaSpan) -> int:
    """A picture takes as many positions as its longer side has rows."""
    return 0 if span.grid is None else max(span.grid) - (span.stop - span.start)
