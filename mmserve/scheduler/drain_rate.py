"""How fast the queue drains while there is one, and so how long it is to wait, and when to come back to it."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
MAX_RECENT = 256  # of those who left last: at a hundred a second, what the load was like in the last seconds
MIN_SPAN_S = 2.0  # of which it must be known whether somebody waited
SHARPNESS = 4  # of the step from a queue that empties now and then to one that never does
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class DrainRate:
    """Counts who leaves the queue for a first step, and for how long anybody was in it.  Times are seconds on one clock, whichever.

    Hours in which nobody waits say nothing about how fast one could be served, so they don't count.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()  # when somebody left, and for how long before nobody did though he waited
        self._waited_s = 0.0  # sum of the latter
        self._was_empty = True  # the queue, after somebody left it last

    def left(self, arrival_s: float, now_s: float, *, is_empty: bool) -> None:
        """Somebody who came at `arrival_s` begins, and leaves an empty queue or doesn't."""
        last_s = self._recent[-1][0] if self._recent else arrival_s
        since_s = max(arrival_s, last_s) if self._was_empty else last_s
        self._was_empty = is_empty
        self._recent.append((now_s, max(0.0, now_s - since_s)))
        self._waited_s += self._recent[-1][1]
        if len(self._recent) > MAX_RECENT:
            self._waited_s -= self._recent.popleft()[1]
        self._forget(now_s)

    def wait_s(self, num_queued: int, now_s: float, setback_s: float = 0.0) -> float:
        """How long the next one will wait behind `num_queued`; 0 while nothing is known.

        Whoever comes in the next `setback_s` goes first.  Where the queue never empties they come as fast as others leave, and the wait
        grows by all of it; where it does now and then, by no more than some of those who are ahead anyway.
        """
        self._forget(now_s)
        if not self._recent:
            return 0.0
        wait_s = num_queued * self._waited_s / len(self._recent)
        load = min(1.0, self._waited_s / max(now_s - self._recent[0][0], MIN_SPAN_S))
        pressure = load**SHARPNESS
        overtaken_s = wait_s + pressure * setback_s
        return overtaken_s if wait_s >= (1 - pressure) * overtaken_s else wait_s / (1 - pressure)

    def retry_after_s(self, num_queued: int, now_s: float) -> float:
        """When those who wait now will have begun, within sensible limits; the longest where nobody was seen to begin."""
        wait_s = self.wait_s(num_queued, now_s)
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S) if self._recent else MAX_RETRY_S

    def _forget(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] <= now_s - WINDOW_S:
            self._waited_s -= self._recent.popleft()[1]
