"""A circuit breaker: when something has failed too often to be asked again, and when to try.  Pure: time is an argument.

Closed, everything goes through.  Open, nothing does, for a pause that grows while it keeps failing.  Then half-open: one probe at a time,
and enough good ones close it.  What was sent while it was closed and ends later says nothing any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """The values are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    max_faults: int = 5  # in a row
    max_fault_share: float = 0.5  # of what ended within `window_s`
    min_outcomes: int = 20  # fewer are no share
    window_s: float = 30.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    num_probes: int = 2  # good ones in a row that close it


class CircuitBreaker:
    """`state` is written by its own methods only."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.state = BreakerState.CLOSED
        self._limits = limits or BreakerLimits()
        self._outcomes: deque[tuple[float, bool]] = deque()  # when, and whether it was a fault; oldest first
        self._num_faults = 0  # of those
        self._num_in_row = 0
        self._num_good_probes = 0
        self._pause_s = 0.0
        self._probe_due_s = 0.0
        self._closed_s = float("-inf")

    def note_success(self, now_s: float) -> None:
        if self.state is BreakerState.CLOSED:
            self._num_in_row = 0
            self._note(False, now_s)

    def note_fault(self, now_s: float, retry_after_s: float | None = None) -> None:
        """`retry_after_s` is how long we were told to stay away: that alone opens it, or keeps it open."""
        if retry_after_s is not None:
            self.trip(now_s, retry_after_s)
        elif self.state is BreakerState.CLOSED:
            self._num_in_row += 1
            self._note(True, now_s)
            limits, num_outcomes = self._limits, len(self._outcomes)
            is_often = num_outcomes >= limits.min_outcomes and self._num_faults >= limits.max_fault_share * num_outcomes
            if self._num_in_row >= limits.max_faults or is_often:
                self.trip(now_s)

    def trip(self, now_s: float, pause_s: float = 0.0) -> None:
        """Open, for `pause_s` at least.  A pause that is running already is only made longer."""
        if self.state is not BreakerState.OPEN:
            limits = self._limits
            is_relapse = self.state is BreakerState.HALF_OPEN or now_s - self._closed_s < limits.longest_pause_s
            self._pause_s = min(2 * self._pause_s, limits.longest_pause_s) if is_relapse and self._pause_s else limits.first_pause_s
            self._probe_due_s = now_s + self._pause_s
            self.state = BreakerState.OPEN
        self._probe_due_s = max(self._probe_due_s, now_s + pause_s)

    def retry_after_s(self, now_s: float) -> float:
        """When asking again makes sense, from now."""
        return max(self._probe_due_s - now_s, 0.0)

    def begin_probe(self, now_s: float) -> None:
        """To be asked once the pause is over, and again only after the probe before it has ended."""
        assert self.state is not BreakerState.CLOSED, "nothing to probe"
        assert self.retry_after_s(now_s) == 0.0, "probed too early"
        if self.state is BreakerState.OPEN:
            self._num_good_probes = 0
            self.state = BreakerState.HALF_OPEN

    def note_good_probe(self, now_s: float) -> None:
        if self.state is not BreakerState.HALF_OPEN:
            return  # tripped meanwhile
        self._num_good_probes += 1
        if self._num_good_probes >= self._limits.num_probes:
            self.state = BreakerState.CLOSED
            self._closed_s = now_s
            self._outcomes.clear()
            self._num_faults = self._num_in_row = 0

    def _note(self, is_fault: bool, now_s: float) -> None:
        self._outcomes.append((now_s, is_fault))
        self._num_faults += is_fault
        while self._outcomes[0][0] < now_s - self._limits.window_s:
            self._num_faults -= self._outcomes.popleft()[1]
