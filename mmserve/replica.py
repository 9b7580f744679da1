"""One decoder worker's life, seen from main: its KV books, its scheduler, and the loop that plans, sends and applies steps.

A replica ends with its worker; the sequences it held are evacuated and live on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from mmserve.errors import WorkerDied
from mmserve.media import MediaSpan
from mmserve.metrics import Metrics
from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.plan import DecoderReady, StepFailed, StepPlan, StepResult
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import Scheduler, SchedulerLimits, TokenUpdate
from mmserve.scheduler.sequence import Sequence
from mmserve.shared_buffer import BufferSlice
from mmserve.supervisor import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

STEP_TIMEOUT_S = 30.0  # a step is bounded by its token budget; one that takes this long is hung


class Rows(Protocol):
    """Where encoded media are: the embedding cache, as far as a replica needs it."""

    def lookup(self, key: bytes) -> BufferSlice | None: ...
    def pin(self, key: bytes) -> None: ...
    def unpin(self, key: bytes) -> None: ...


class Replica:
    """`deliver` gets every token, `want` every media span that a sequence waits for."""

    def __init__(
        self,
        name: str,
        worker: Worker,
        ready: DecoderReady,
        limits: SchedulerLimits,
        rows: Rows,
        metrics: Metrics,
        records: Records,
        *,
        enable_prefix_caching: bool,
        deliver: Callable[[list[TokenUpdate]], None],
        want: Callable[[Sequence, MediaSpan], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name  # the decoder's: small or large
        self.kv = KVCacheManager(ready.num_blocks, ready.block_size, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(limits, self.kv, rows.lookup, records)
        self._worker = worker
        self._rows = rows
        self._metrics = metrics
        self._deliver = deliver
        self._want = want
        self._now_s = now_s
        self._wake = asyncio.Event()
        self._seen = (0, 0, 0)  # preemptions, prefix queries, prefix hits already counted

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self.wake()

    def abort(self, seq_id: int) -> None:
        """Free its blocks at once, or when the step in flight lands.  Unknown ids are ignored: the sequence may have just ended."""
        self.scheduler.abort(seq_id)
        self.wake()

    def wake(self) -> None:
        """Something changed that may let a sequence advance."""
        self._wake.set()

    async def run(self) -> None:
        """Step until the worker dies.  Raises WorkerDied."""
        while True:
            self._wake.clear()
            plan = self.scheduler.schedule(self._now_s())
            for sequence, span in self.scheduler.wanted_media():
                self._want(sequence, span)
            self._report()
            if plan is None:
                await self._idle()
                continue
            with self._pinned(plan):
                reply = await self._worker.call(plan, STEP_TIMEOUT_S)
            if isinstance(reply, StepFailed):
                log.warning("worker=%s pid=%d step=%d failed: %s", self.name, self._worker.pid, reply.step_id, reply.reason)
                self._deliver(self.scheduler.step_failed(reply))
                continue
            assert isinstance(reply, StepResult), f"unexpected reply {type(reply).__name__}"
            self._metrics.gpu_seconds.labels("decode").inc(reply.seconds)
            self._deliver(self.scheduler.apply(reply, self._now_s()))

    async def _idle(self) -> None:
        """Until woken.  Raises WorkerDied if the worker goes first."""
        self.scheduler.check()
        waits = [asyncio.ensure_future(self._wake.wait()), asyncio.ensure_future(self._worker.died.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._worker.died.is_set():
            raise WorkerDied("ended while idle")

    @contextmanager
    def _pinned(self, plan: StepPlan) -> Iterator[None]:
        """Rows that a step in flight reads must not be evicted and written over."""
        keys = [media.key for media in plan.media]
        for key in keys:
            self._rows.pin(key)
        try:
            yield
        finally:
            for key in keys:
                self._rows.unpin(key)

    def _report(self) -> None:
        metrics, scheduler = self._metrics, self.scheduler
        metrics.num_requests_running.labels(self.name).set(scheduler.num_running)
        metrics.num_requests_waiting.labels(self.name).set(scheduler.num_waiting)
        metrics.kv_cache_usage_perc.labels(self.name).set(scheduler.kv_usage)
        counts = (scheduler.num_preemptions, scheduler.num_prefix_queries, scheduler.num_prefix_hits)
        counters = (metrics.num_preemptions, metrics.prefix_cache_queries, metrics.prefix_cache_hits)
        for counter, now, before in zip(counters, counts, self._seen, strict=True):
            counter.labels(self.name).inc(now - before)
        self._seen = counts
