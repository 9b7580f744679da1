"""Keeps worker processes alive: spawn, wait until ready, watch, kill what hangs, start again with a growing pause.

Knows nothing of what workers compute.  A worker is one process, or the ranks of a tensor-parallel group that live and die together.
Its life ends as `WorkerDied`, whether it crashed, was killed, or made no progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from mmserve.child_process import start_child
from mmserve.errors import MmserveError, WorkerDied
from mmserve.plan import Shutdown
from mmserve.transport import Channel, pack

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # loading weights and warming up, also on a busy machine
FIRST_PAUSE_S = 0.1
PAUSE_GROWTH = 4.0  # six starts in the first minute of a crash loop, and two in every other
LONGEST_PAUSE_S = 30.0
GOOD_LIFE_S = 5.0  # of a worker that was asked nothing
BROKEN_AFTER = 3  # lives in a row that came to nothing: a crash loop, which opens the circuit
HOPELESS_AFTER = 6  # whoever waits for it is told so


def alone(*args: object) -> Callable[[], Sequence[tuple[object, ...]]]:
    """A worker of one process, with the same arguments in every life."""
    return lambda: [args]


class WorkerFailedToStart(MmserveError):
    """A worker ended before it was ready, the first time it was started: a fault of the set-up, which a restart won't mend."""

    code = "worker_failed_to_start"


@dataclass(frozen=True, slots=True)
class _Call:
    reply: asyncio.Future[Any]
    timeout_s: float


class Worker:
    """One life of one worker.  It answers messages in the order in which they were sent.

    Every rank is sent every message and answers it; the answer of rank 0 is the worker's.
    """

    def __init__(self, role: str, processes: Sequence[BaseProcess], channels: Sequence[Channel]) -> None:
        self.role = role
        self.died = asyncio.Event()
        self.num_answers = 0
        self._processes = tuple(processes)
        self.pids = tuple(process.pid or 0 for process in processes)  # of the ranks, in their order
        self._channels = channels
        self._alive = set(processes)
        self._all_gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._calls: deque[_Call] = deque()  # not answered yet
        self._deadline: asyncio.TimerHandle | None = None  # of the first of them
        self._reader: asyncio.Task[None] | None = None  # once it is ready
        for process in processes:
            self._loop.add_reader(process.sentinel, partial(self._note_death, process))

    @classmethod
    async def spawn(cls, role: str, target: str, args_of_ranks: Sequence[tuple[object, ...]]) -> Worker:
        """One process for each tuple of arguments."""
        started: list[tuple[BaseProcess, socket.socket]] = []
        try:
            for rank, args in enumerate(args_of_ranks):
                name = f"mmserve-{role}" if len(args_of_ranks) == 1 else f"mmserve-{role}-rank-{rank}"
                started.append(start_child(target, args, name=name, is_large=True))
            return cls(role, [process for process, _ in started], [await Channel.open(end) for _, end in started])
        except BaseException:
            for process, end in started:
                process.kill()
                process.join()
                end.close()
            raise

    @property
    def pid(self) -> int:
        return self.pids[0]

    def send(self, message: object, timeout_s: float) -> asyncio.Future[Any]:
        """The reply to come.  The time counts from when everything sent before has been answered; who doesn't keep it is killed.

        The reply is WorkerDied where there is none.
        """
        reply: asyncio.Future[Any] = self._loop.create_future()
        try:
            self._write(message)
        except WorkerDied as error:
            return _failed(reply, error)
        self._calls.append(_Call(reply, timeout_s))
        if len(self._calls) == 1:
            self._watch_first()
        return reply

    async def call(self, message: object, timeout_s: float) -> Any:
        """Send and wait for the reply.  A worker whose caller goes away is killed: what it would write has no place.  Raises WorkerDied."""
        try:
            return await self.send(message, timeout_s)
        except asyncio.CancelledError:
            self.kill()
            raise

    async def receive(self, timeout_s: float) -> Any:
        """The message nobody asked for, its ready report; only then can it be called.  Raises WorkerDied."""
        try:
            async with asyncio.timeout(timeout_s):
                report = await self._receive()
        except TimeoutError:
            raise WorkerDied(f"{self.role} was not ready in {timeout_s:.0f} s") from None
        self._reader = self._loop.create_task(self._read(), name=f"read-{self.role}")
        return report

    def kill(self) -> None:
        for process in self._alive:
            process.kill()

    async def stop(self, grace_s: float) -> None:
        """Ask it to leave, then make it."""
        with contextlib.suppress(WorkerDied, TimeoutError):
            async with asyncio.timeout(grace_s):
                self._write(Shutdown())
                await self.died.wait()
        await self.bury()

    async def bury(self) -> None:
        """Make sure it is gone and reaped.  Idempotent."""
        self.kill()
        try:
            await self._all_gone.wait()  # a join before that would hold up the loop
        finally:
            self._end_calls(WorkerDied(f"{self.role} was stopped"))
        for process in self._processes:
            process.join()
            process.close()  # its pipes, now and not when the garbage is collected
        self._processes = ()

    def _write(self, message: object) -> None:
        data = pack(message)
        for channel in self._channels:
            channel.write(data)

    async def _receive(self) -> Any:
        replies = [await channel.receive() for channel in self._channels]
        return replies[0]

    async def _read(self) -> None:
        """Every answer to its call, until the worker is gone."""
        try:
            while True:
                answer = await self._receive()
                self.num_answers += 1
                call = self._calls.popleft()
                self._watch_first()
                if not call.reply.done():
                    call.reply.set_result(answer)
        except WorkerDied as error:
            self._end_calls(error)

    def _watch_first(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(self._calls[0].timeout_s, self._give_up) if self._calls else None

    def _give_up(self) -> None:
        timeout_s = self._calls[0].timeout_s
        log.error("worker=%s pid=%d no answer in %.0f s, killing it", self.role, self.pid, timeout_s)
        self.kill()
        self._end_calls(WorkerDied(f"{self.role} hung: no answer in {timeout_s:g} s"))

    def _end_calls(self, error: WorkerDied) -> None:
        """Nobody gets an answer any more."""
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        for channel in self._channels:
            channel.close()
        calls, self._calls = self._calls, deque()
        self._watch_first()
        for call in calls:
            if not call.reply.done():
                _failed(call.reply, error)

    def _note_death(self, process: BaseProcess) -> None:
        self._loop.remove_reader(process.sentinel)
        self._alive.discard(process)
        self.kill()  # ranks left alone would wait for ever in a collective
        self.died.set()
        if not self._alive:
            self._all_gone.set()


def _failed(reply: asyncio.Future[Any], error: WorkerDied) -> asyncio.Future[Any]:
    reply.set_exception(error)
    reply.exception()  # whoever doesn't wait for it need not be told
    return reply


class Supervisor:
    """One role that must always have a living worker.

    `args_of_ranks()` gives the arguments of each process of a new life.  `serve(worker, ready)` is given each life once it is ready, and
    returns or raises WorkerDied when the life is over.
    """

    def __init__(
        self,
        role: str,
        target: str,
        args_of_ranks: Callable[[], Sequence[tuple[object, ...]]],
        serve: Callable[[Worker, Any], Awaitable[None]],
        *,
        on_restart: Callable[[str], None],
    ) -> None:
        self.role = role
        self._target = target
        self._args_of_ranks = args_of_ranks
        self._serve = serve
        self._on_restart = on_restart
        self._loop = asyncio.get_running_loop()
        self._first_ready: asyncio.Future[None] = self._loop.create_future()
        self._num_failures = 0
        self._next_start_s = 0.0  # of the loop's clock
        self._ready_s = math.inf  # when this life was
        self._worker: Worker | None = None
        self._closing = False
        self._task = asyncio.create_task(self._run(), name=f"supervise-{role}")

    @property
    def broken(self) -> bool:
        """It has ended so often in a row before it did anything that waiting for it is not a plan."""
        return self._num_failures >= BROKEN_AFTER

    @property
    def hopeless(self) -> bool:
        """And so often that who has waited since has waited long enough."""
        return self._num_failures >= HOPELESS_AFTER

    @property
    def next_start_in_s(self) -> float:
        """How long it is until it is tried again; 0 while one lives or starts."""
        return max(0.0, self._next_start_s - self._loop.time())

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker is not None else None

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all ranks."""
        return self._worker.pids if self._worker is not None else ()

    async def first_ready(self) -> None:
        """Raises WorkerFailedToStart if the first life ends before it is ready."""
        await asyncio.shield(self._first_ready)

    async def close(self, grace_s: float = 2.0) -> None:
        self._closing = True
        if self._worker is not None:
            is_ready = self._ready_s < math.inf  # one that loads doesn't listen, and has nothing to put in order
            await self._worker.stop(grace_s if is_ready else 0.0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._first_ready.done():
            self._first_ready.exception()

    async def _run(self) -> None:
        while not self._closing:
            worker = self._worker = await Worker.spawn(self.role, self._target, self._args_of_ranks())
            self._ready_s = math.inf
            try:
                await self._live(worker)
            except WorkerDied as error:
                if self._closing:
                    return
                log.warning("worker=%s pid=%d died (%s)", self.role, worker.pid, error)
            except Exception:  # ours, not the worker's; whoever it serves must not wait for ever
                log.exception("worker=%s pid=%d could not be served", self.role, worker.pid)
            finally:
                await worker.bury()
            if not self._first_ready.done():
                self._first_ready.set_exception(WorkerFailedToStart(f"the {self.role} worker ended before it was ready; its log says why"))
                return
            # A worker that was killed at work is no crash loop, however often that happens.
            was_good = worker.num_answers > 0 or self._loop.time() >= self._ready_s + GOOD_LIFE_S
            self._num_failures = 0 if was_good else self._num_failures + 1
            if self._num_failures == BROKEN_AFTER:
                log.error(
                    "worker=%s has ended %d times before it did anything: requests are refused until it works", self.role, BROKEN_AFTER
                )
            pause_s = min(FIRST_PAUSE_S * PAUSE_GROWTH ** max(0, self._num_failures - 1), LONGEST_PAUSE_S)
            self._next_start_s = self._loop.time() + pause_s
            self._on_restart(self.role)
            await asyncio.sleep(pause_s)

    async def _live(self, worker: Worker) -> None:
        ready = await worker.receive(START_TIMEOUT_S)
        self._ready_s = self._loop.time()
        log.info("worker=%s pid=%d ready", self.role, worker.pid)
        if not self._first_ready.done():
            self._first_ready.set_result(None)
        await self._serve(worker, ready)
