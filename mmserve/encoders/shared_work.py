"""Work that several need: begun for the first, given up when the last one leaves before its end, let go of when nobody needs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(eq=False)
class _Work(Generic[V]):
    task: asyncio.Task[V]
    num_users: int = 0


class SharedWork(Generic[K, V]):
    """Owned by the event loop.  `release` gets each result once nobody uses it any more."""

    def __init__(self, release: Callable[[V], None] = lambda result: None) -> None:
        self._release = release
        self._work: dict[K, _Work[V]] = {}

    def __len__(self) -> int:
        return len(self._work)

    @asynccontextmanager
    async def result(self, key: K, begin: Callable[[], Coroutine[Any, Any, V]]) -> AsyncIterator[V]:
        """Of the work under `key`; `begin()` if there is none.  Raises what the work raises."""
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = _Work(asyncio.create_task(begin(), name="shared-work"))
        work.num_users += 1
        try:
            yield await asyncio.shield(work.task)
        finally:
            work.num_users -= 1
            if work.num_users == 0:
                del self._work[key]
                work.task.cancel()  # nothing to a task that is done; one that isn't gives back what it holds itself
                work.task.add_done_callback(self._let_go)

    async def close(self) -> None:
        """Give up what is under way."""
        for work in self._work.values():
            work.task.cancel()
        await asyncio.gather(*(work.task for work in self._work.values()), return_exceptions=True)

    def _let_go(self, task: asyncio.Task[V]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._release(task.result())
