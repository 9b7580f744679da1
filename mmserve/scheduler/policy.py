"""Who comes first: keys by which sequences are ordered, and queues kept in that order."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from mmserve.scheduler.sequence import Sequence

AGEING_TOKENS_PER_S = 500.0
"""How fast a waiting sequence grows cheaper.  A 4,000-token prompt is overtaken by small ones that come up to 8 s later."""

Key = tuple[float, ...]


def waiting_key(sequence: Sequence, num_uncached: int) -> Key:
    """Priority; then streams that have begun; then cost in tokens to compute, aged.

    Everybody ages at the same rate, so the order of two sequences never changes and `cost - rate * (now - arrival)` can leave out `now`.
    """
    aged_cost = num_uncached + AGEING_TOKENS_PER_S * sequence.arrival_s
    return (sequence.priority, sequence.num_output == 0, aged_cost, sequence.seq_id)


def running_key(sequence: Sequence) -> Key:
    """The last one is the first to be preempted: lowest priority, youngest."""
    return (sequence.priority, sequence.arrival_s, sequence.seq_id)


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
