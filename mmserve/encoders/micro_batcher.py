"""Which windows share a forward pass, and when it leaves.  Pure: no clock; time is an argument.

The wait is counted from the oldest item, so that a steady trickle can't put a batch off for ever.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class MicroBatcher(Generic[T]):
    """First in, first out.  A batch is due when it is full or its oldest item has waited `window_s`."""

    def __init__(self, window_s: float, max_items: int) -> None:
        self._window_s = window_s
        self._max_items = max_items
        self._waiting: deque[tuple[float, T]] = deque()  # (arrival, item), oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due_s(self) -> float | None:
        """When the next batch should leave: a time in the past if it is full, None if there is nothing."""
        if not self._waiting:
            return None
        oldest, _ = self._waiting[0]
        return oldest if len(self._waiting) >= self._max_items else oldest + self._window_s

    def add(self, item: T, now_s: float) -> None:
        self._waiting.append((now_s, item))

    def put_back(self, items: list[T], arrival_s: float) -> None:
        """Items whose batch came to nothing go first again, and have waited long enough."""
        self._waiting.extendleft((arrival_s - self._window_s, item) for item in reversed(items))

    def remove(self, item: T) -> bool:
        """False if it has left already."""
        for i, (_, waiting) in enumerate(self._waiting):
            if waiting is item:
                del self._waiting[i]
                return True
        return False

    def take(self, now_s: float) -> list[T]:
        """The batch that is due, or nothing yet."""
        due_s = self.due_s
        if due_s is None or now_s < due_s:
            return []
        return [self._waiting.popleft()[1] for _ in range(min(self._max_items, len(self._waiting)))]

    def take_all(self) -> list[T]:
        items = [item for _, item in self._waiting]
        self._waiting.clear()
        return items
