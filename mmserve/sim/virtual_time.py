"""An event loop whose clock jumps to the next timer instead of waiting for it: hours of asyncio in seconds, the same every time.

For code that takes its time from the loop and waits for nothing outside it: no threads, no sockets, no processes.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run_in_virtual_time(main: Coroutine[Any, Any, T], *, seed: int = 0, jitter_s: float = 0.0) -> T:
    """Run to the end; time starts at 0.  Every timer is late by up to `jitter_s`, drawn from `seed`: another seed, another order.

    Raises RuntimeError where everybody would wait for ever.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed, jitter_s)) as runner:
        return runner.run(main)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, seed: int = 0, jitter_s: float = 0.0) -> None:
        self._now_s = 0.0
        self._random = random.Random(seed)
        self._jitter_s = jitter_s
        super().__init__(_LeapingSelector(self))

    def time(self) -> float:
        return self._now_s

    def leap(self, seconds: float) -> None:
        self._now_s += seconds

    def call_at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.TimerHandle:
        late_s = self._random.uniform(0.0, self._jitter_s) if self._jitter_s else 0.0
        return super().call_at(when + late_s, callback, *args, context=context)


class _LeapingSelector(selectors.DefaultSelector):
    """Never blocks: a wait of so many seconds is a leap."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise RuntimeError("everybody waits, and there is no timer")
        self._loop.leap(max(0.0, timeout))
        return events
