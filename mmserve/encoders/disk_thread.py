"""One thread for a disk that may hang: who asks waits for a while and no longer; work that hangs keeps the thread, not the caller.

Knows nothing of what it works on.  The thread is a daemon, unlike an executor's: a process must be able to end before its disk answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

R = TypeVar("R")


class Withdrawn(Exception):
    """Nobody waits for this work any more."""


class Claim:
    """`with claim:` is the right to touch the caller's memory; it ends when the caller stops waiting.  Raises Withdrawn after that.

    What is done inside is a copy, never I/O: the caller's loop waits for it to end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.withdrawn = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.withdrawn:
            self._lock.release()
            raise Withdrawn

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._lock.release()

    def withdraw(self) -> None:
        with self._lock:
            self.withdrawn = True


class DiskThread:
    """Work is done in the order it was asked for.  `do` from one event loop."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Claim] | None] = SimpleQueue()
        self._current: Claim | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Work that its caller has given up on is still going on."""
        current = self._current
        return current is not None and current.withdrawn

    async def do(self, work: Callable[[Claim], R], timeout_s: float) -> R:
        """What `work` returns or raises.  Raises TimeoutError; work that has begun then goes on, with its claim withdrawn."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()
        claim = Claim()

        def settle(result: R | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def job() -> None:
            result, failure = None, None
            try:
                result = work(claim)
            except BaseException as error:  # whoever waits gets it
                failure = error
            self._current = None  # before anybody can ask for more
            with suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(settle, result, failure)

        self._jobs.put((job, claim))
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        finally:
            claim.withdraw()

    def stop(self) -> None:
        """After what has been asked for.  Doesn't wait."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, claim = item
            if claim.withdrawn:
                continue
            self._current = claim
            job()
