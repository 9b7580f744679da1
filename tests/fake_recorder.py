"""What records decode steps where there are no CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable


class FakeRecorder:
    """Replays by running the step over the same memory.  Counts, so that a test sees which bucket was used."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        number = len(self.recorded)
        self.recorded.append(number)
        step()

        def replay() -> None:
            self.replayed.append(number)
            step()

        return replay
