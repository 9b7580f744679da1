"""One decoder worker's life, seen from main: its KV books, its scheduler, and the loop that plans, sends and applies steps.

The next step is planned just before the one that runs should end: so late that who comes meanwhile is in it, so early that the worker
need not wait.  A replica ends with its worker; the sequences it held are evacuated and live on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mmserve.errors import WorkerDied
from mmserve.media import MediaSpan
from mmserve.metrics import Metrics
from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.plan import DecoderReady, StepFailed, StepResult
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler, TokenUpdate
from mmserve.scheduler.sequence import Sequence
from mmserve.shared_buffer import BufferSlice

log = logging.getLogger(__name__)

HUNG_S = 5.0  # beyond what a step may take, a worker that has not answered is hung
SLOWER = 10.0  # than predicted a step may be: the machine has other things to do, or a context is longer than any before
GUESS_TIMEOUT_S = 600.0  # of a step larger than any that was measured: a 7B decoder on a laptop takes minutes for a thousand tokens
CHECK_EVERY_S = 1.0  # at most, when nobody waits: looking at every block takes milliseconds
PLAN_AHEAD_S = 0.004  # before the end of a step, for the next: to plan 256 rows, send them, and be a little wrong about the end


class Rows(Protocol):
    """Where encoded media are: the embedding cache, as far as a replica needs it."""

    def lookup(self, key: bytes) -> BufferSlice | None: ...
    def pin(self, key: bytes) -> None: ...
    def unpin(self, key: bytes) -> None: ...


class Steps(Protocol):
    """Who computes: a worker, as far as a replica needs it."""

    @property
    def pid(self) -> int: ...
    @property
    def died(self) -> asyncio.Event: ...
    def send(self, message: object, timeout_s: float) -> asyncio.Future[Any]: ...


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was sent."""

    reply: asyncio.Future[Any]
    pinned: tuple[bytes, ...]  # keys of the rows it reads: they must not be evicted and written over


class Replica:
    """`deliver` gets every token, `want` every media span that a sequence waits for."""

    def __init__(
        self,
        name: str,
        worker: Steps,
        ready: DecoderReady,
        limits: SchedulerLimits,
        rows: Rows,
        metrics: Metrics,
        records: Records,
        *,
        enable_prefix_caching: bool,
        deliver: Callable[[list[TokenUpdate]], None],
        want: Callable[[Sequence, MediaSpan], None],
        now_s: Callable[[], float],
    ) -> None:
        self.name = name  # the decoder's: small or large
        self.kv = KVCacheManager(ready.num_blocks, ready.block_size, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(limits, self.kv, rows.lookup, records)
        self._worker = worker
        self._rows = rows
        self._metrics = metrics
        self._records = records
        self._deliver = deliver
        self._want = want
        self._now_s = now_s
        self._wake = asyncio.Event()
        self._flights: deque[_Flight] = deque()  # oldest first
        self._began_s = 0.0  # when the oldest of them began to run
        self._checked_s = -math.inf
        self._seen = (0, 0, 0)  # preemptions, prefix queries, prefix hits already counted

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self.wake()

    def abort(self, seq_id: int) -> None:
        """Free its blocks at once.  Unknown ids are ignored: the sequence may have just ended."""
        self.scheduler.abort(seq_id)
        self.wake()

    def wake(self) -> None:
        """Something changed that may let a sequence advance."""
        self._wake.set()

    async def run(self) -> None:
        """Step until the worker dies.  Raises WorkerDied."""
        death = asyncio.create_task(self._watch_death())
        timer: asyncio.TimerHandle | None = None
        try:
            while True:
                self._wake.clear()
                while self._flights and self._flights[0].reply.done():
                    self._land()
                due_in_s = self._due_in_s()
                if due_in_s <= 0:
                    self._launch()
                elif due_in_s < math.inf:
                    timer = asyncio.get_running_loop().call_later(due_in_s, self._wake.set)
                if not self._flights:
                    if self._worker.died.is_set():
                        raise WorkerDied("ended while idle")
                    self._check()
                await self._wake.wait()
                if timer is not None:
                    timer.cancel()
        finally:
            death.cancel()
            if self._flights:
                self._count_lost(self._now_s() - self._began_s, "dead_worker")
            while self._flights:
                self._unpin(self._flights.popleft())

    def _check(self) -> None:
        """The books, now and then: a mistake in them ends this worker's life.  Raises AssertionError."""
        now_s = self._now_s()
        if now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            self.scheduler.check()

    def _due_in_s(self) -> float:
        """When to plan the next step."""
        if len(self._flights) == MAX_STEPS_IN_FLIGHT:
            return math.inf
        if not self._flights:
            return 0.0
        return self._began_s + self.scheduler.expected_s - PLAN_AHEAD_S - self._now_s()

    def _launch(self) -> None:
        """Plan and send, if there is anything to compute."""
        plan = self.scheduler.schedule(self._now_s())
        for sequence, span in self.scheduler.wanted_media():
            self._want(sequence, span)
        self._report()
        if plan is None:
            return
        pinned = tuple(media.key for media in plan.media)
        for key in pinned:
            self._rows.pin(key)
        if not self._flights:
            self._began_s = self._now_s()
        timeout_s = min(HUNG_S + SLOWER * self.scheduler.slowest_s, GUESS_TIMEOUT_S)
        reply = self._worker.send(plan, timeout_s)
        self._flights.append(_Flight(reply, pinned))
        reply.add_done_callback(lambda _: self._wake.set())
        self._wake.set()  # perhaps the one after it is due, too

    def _land(self) -> None:
        """Take in the answer to the oldest step.  Raises WorkerDied."""
        flight = self._flights.popleft()
        self._unpin(flight)
        self._began_s = self._now_s()  # of the next
        reply = flight.reply.result()
        if isinstance(reply, StepFailed):
            log.warning("worker=%s pid=%d step=%d failed: %s", self.name, self._worker.pid, reply.step_id, reply.reason)
            self._count_lost(reply.seconds, "failed_step")
            self._deliver(self.scheduler.step_failed(reply))
            return
        assert isinstance(reply, StepResult), f"unexpected reply {type(reply).__name__}"
        updates = self.scheduler.apply(reply, self._now_s())
        self._count_time()
        self._deliver(updates)

    async def _watch_death(self) -> None:
        await self._worker.died.wait()
        self._wake.set()

    def _unpin(self, flight: _Flight) -> None:
        for key in flight.pinned:
            self._rows.unpin(key)

    def _count_time(self) -> None:
        spent, metrics = self._records.take_gpu_time(), self._metrics
        metrics.gpu_seconds.labels("prefill").inc(spent.prefill_s)
        metrics.gpu_seconds.labels("decode").inc(spent.decode_s)
        self._count_overhead(spent.recomputed_s, "recomputed")

    def _count_lost(self, seconds: float, reason: str) -> None:
        """Of a step that came to nothing."""
        self._count_overhead(seconds * self._records.num_gpus, reason)

    def _count_overhead(self, gpu_s: float, reason: str) -> None:
        self._metrics.gpu_seconds.labels("lost").inc(gpu_s)
        self._metrics.gpu_overhead_seconds.labels(reason).inc(gpu_s)

    def _report(self) -> None:
        metrics, scheduler = self._metrics, self.scheduler
        metrics.num_requests_running.labels(self.name).set(scheduler.num_running)
        metrics.num_requests_waiting.labels(self.name).set(scheduler.num_waiting)
        metrics.kv_cache_usage_perc.labels(self.name).set(scheduler.kv.usage)
        counts = (scheduler.num_preemptions, scheduler.num_prefix_queries, scheduler.num_prefix_hits)
        counters = (metrics.num_preemptions, metrics.prefix_cache_queries, metrics.prefix_cache_hits)
        for counter, now, before in zip(counters, counts, self._seen, strict=True):
            counter.labels(self.name).inc(now - before)
        self._seen = counts
