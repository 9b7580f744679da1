"""Who comes first: keys by which sequences are ordered, and queues kept in that order."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Iterator

from mmserve.scheduler.sequence import Sequence

AGEING_MS_PER_S = 100.0
"""How fast a waiting sequence grows cheaper.  On an A100 a prompt with six pictures is overtaken by small ones for up to 4 s."""

MAX_OVERTAKEN_S = 15.0
"""However slow the device, nobody is overtaken by those who come later than this: half of what a first step may be waited for."""

Key = tuple[int, bool, float, int]
"""Priority, whether nothing was said yet, a time in seconds, seq_id."""


def waiting_key(sequence: Sequence, cost_ms: float) -> Key:
    """Priority; then streams that have begun; then estimated GPU time, aged.

    Everybody ages at the same rate, so the order of two sequences never changes and `cost - rate * (now - arrival)` can leave out `now`:
    divided by the rate it is the time until which those who cost nothing go first.
    """
    overtaken_s = min(cost_ms / AGEING_MS_PER_S, MAX_OVERTAKEN_S)
    return (sequence.priority, sequence.num_output == 0, sequence.arrival_s + overtaken_s, sequence.seq_id)


def newcomer_key(now_s: float, cost_ms: float) -> Key:
    """Of one who has no number yet, and comes after all others of the same time."""
    return (0, True, now_s + min(cost_ms / AGEING_MS_PER_S, MAX_OVERTAKEN_S), sys.maxsize)


def running_key(sequence: Sequence) -> Key:
    """The last one is the first to be preempted: lowest priority, youngest."""
    return (sequence.priority, False, sequence.arrival_s, sequence.seq_id)


class SequenceQueue:
    """Sequences sorted by a key that is fixed when they join."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._sequences: list[Sequence] = []
        self._key_of: dict[int, Key] = {}

    def add(self, sequence: Sequence, key: Key) -> None:
        assert sequence.seq_id not in self._key_of, f"sequence {sequence.seq_id} queued twice"
        index = bisect.bisect(self._keys, key)
        self._keys.insert(index, key)
        self._sequences.insert(index, sequence)
        self._key_of[sequence.seq_id] = key

    def remove(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self._keys, self._key_of.pop(sequence.seq_id))
        assert self._sequences[index] is sequence
        del self._keys[index], self._sequences[index]

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def num_before(self, key: Key, delay_s: float, wanted: Callable[[Sequence], bool]) -> int:
        """How many who are `wanted` go before one with that key, if all their own are `delay_s` later."""
        priority, is_new, time_s, seq_id = key
        index = bisect.bisect(self._keys, (priority, is_new, time_s - delay_s, seq_id))
        return sum(map(wanted, self._sequences[:index]))

    def delayed(self, delay_s: float, wanted: Callable[[Sequence], bool] | None = None) -> Iterator[tuple[Key, Sequence]]:
        """All who are `wanted` of those here now, in order, with keys that are `delay_s` later."""
        for key, sequence in zip(self._keys[:], self._sequences[:], strict=True):
            if wanted is None or wanted(sequence):
                priority, is_new, time_s, seq_id = key
                yield (priority, is_new, time_s + delay_s, seq_id), sequence
