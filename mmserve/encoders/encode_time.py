"""How long a batch may take before its encoder is taken for hung, learnt from how long others have taken.  Pure: time is an argument.

A batch takes no longer than one that is as large.  Sizes are bytes of pixels and samples, in steps of two: towers that take pictures of
any size don't take the same time for each.
"""

from __future__ import annotations

from collections.abc import Iterable

from mmserve.plan import EncodeItem

HUNG_S = 5.0  # beyond what a batch may take, an encoder that has not answered is hung
SLOWER = 10.0  # than others of its size a batch may be: the machine has other things to do
GUESS_TIMEOUT_S = 120.0  # of a batch larger than any before: 48 pictures on a busy laptop
FORGETS = 0.1  # of the slowest so far, with each batch that was faster


class EncodeTime:
    """One for each worker, through all its lives."""

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}  # by size

    def timeout_s(self, items: Iterable[EncodeItem]) -> float:
        size = _size(items)
        as_large = [known for known in self._slowest_s if known >= size]
        return HUNG_S + SLOWER * self._slowest_s[min(as_large)] if as_large else GUESS_TIMEOUT_S

    def note(self, items: Iterable[EncodeItem], seconds: float) -> None:
        size = _size(items)
        faded_s = self._slowest_s.get(size, seconds) * (1 - FORGETS) + seconds * FORGETS
        self._slowest_s[size] = max(seconds, faded_s)


def _size(items: Iterable[EncodeItem]) -> int:
    """Power of two that the bytes fit in."""
    return sum(item.features.num_bytes for item in items).bit_length()
