"""Which of several replicas a sequence goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as seen by one sequence."""

    num_cached: int  # tokens of the sequence in the replica's prefix cache
    num_pending: int  # tokens the replica has still to compute for others


def place(candidates: Sequence[Candidate]) -> int:
    """Index of the replica to choose: the longest cached prefix, unless there is more to wait for than it saves; else the least pending.

    Both are tokens to compute, so they can be subtracted.  By the prefix alone, a common system prompt would send everybody to one replica.
    """

    def cost(index: int) -> tuple[int, int]:
        candidate = candidates[index]
        return (candidate.num_pending - candidate.num_cached, candidate.num_pending)

    return min(range(len(candidates)), key=cost)
