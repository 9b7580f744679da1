"""How fast the queue drains, and so when to come back to it."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class DrainRate:
    """Counts who leaves the queue for a first step.  Times are seconds on one clock, whichever."""

    def __init__(self) -> None:
        self._left_s: deque[float] = deque()  # within the window
        self._since_s: float | None = None  # when counting began

    def left(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s
        self._left_s.append(now_s)
        self._forget(now_s)

    def per_s(self, now_s: float) -> float:
        """Sequences a second over the window, or over what there is of it; 0 if none has left."""
        self._forget(now_s)
        if self._since_s is None:
            return 0.0
        return len(self._left_s) / min(max(now_s - self._since_s, 1.0), WINDOW_S)

    def retry_after_s(self, num_queued: int, now_s: float) -> float:
        """When those who wait now will have begun, within sensible limits; the longest where nobody was seen to begin."""
        per_s = self.per_s(now_s)
        return min(max(num_queued / per_s, MIN_RETRY_S), MAX_RETRY_S) if per_s > 0 else MAX_RETRY_S

    def _forget(self, now_s: float) -> None:
        while self._left_s and self._left_s[0] <= now_s - WINDOW_S:
            self._left_s.popleft()
