"""Who was aboard dying workers, and is computed alone until it is known not to be the cause.  Pure: no torch, no asyncio, no clock.

Once is bad luck.  After the second time a sequence gets steps of its own until it is past the place where it was: if the worker dies
again, it was this one; if not, it goes back among the others.  Everybody else is computed in the steps between.
"""

from __future__ import annotations

from collections.abc import Iterator

from mmserve.scheduler.plan_builder import StepInFlight
from mmserve.scheduler.sequence import Sequence

SUSPECT_DEATHS = 2
MAX_DEATHS = 8  # whatever its trials said


class Trials:
    """Of one replica.  Writes what a sequence is suspected of, and nothing else of it."""

    def __init__(self) -> None:
        self._suspects: dict[int, Sequence] = {}  # by seq_id, who came first first
        self._is_crowds_turn = False

    def __len__(self) -> int:
        return len(self._suspects)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._suspects.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._suspects

    def join(self, sequence: Sequence) -> None:
        if sequence.trial_stop > 0:
            self._suspects[sequence.seq_id] = sequence

    def leave(self, sequence: Sequence) -> None:
        self._suspects.pop(sequence.seq_id, None)

    def landed(self, sequence: Sequence) -> None:
        """A step of its own went well."""
        if sequence.num_computed >= sequence.trial_stop:
            sequence.trial_stop = 0
            self.leave(sequence)

    def turns(self) -> tuple[bool, bool]:
        """Whether the next step is for a suspect: by turns, first choice and second."""
        first = len(self._suspects) > 0 and not self._is_crowds_turn
        return (first, not first)

    def took_turn(self, *, is_trial: bool) -> None:
        self._is_crowds_turn = is_trial


def blame(step: StepInFlight) -> None:
    """A worker died over this step."""
    for sequence, start, _, _ in step.rows:
        was_alone = start < sequence.trial_stop
        sequence.num_worker_deaths += 1
        sequence.is_fatal = was_alone or sequence.num_worker_deaths >= MAX_DEATHS
        if sequence.num_worker_deaths >= SUSPECT_DEATHS:
            sequence.trial_stop = sequence.num_tokens  # what had been drawn was reported, so the step computed nothing beyond
