"""Which of several replicas a sequence goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as seen by one sequence."""

    saved_ms: float  # GPU time that its prefix cache would save the sequence
    pending_ms: float  # GPU time it has still to spend on others
    harm_ms: float = 0.0  # what the sequence and those who are there would draw out each other's answers, weighed


def place(candidates: Sequence[Candidate]) -> int:
    """Index of the replica to choose: the longest cached prefix, unless there is more to wait for than it saves, and the least harm done.

    All are GPU time, so they can be added.  By the prefix alone, a common system prompt would send everybody to one replica.
    """

    def cost(index: int) -> tuple[float, float]:
        candidate = candidates[index]
        return (candidate.pending_ms + candidate.harm_ms - candidate.saved_ms, candidate.pending_ms)

    return min(range(len(candidates)), key=cost)
