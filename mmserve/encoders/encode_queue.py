"""The queue in front of one modality's encoder workers: batches leave, items land, fail alone, or come back when their worker dies.

Knows of windows only as slices to read and slices to write.  A slice may be given away when `encode` has ended, not before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from mmserve.encoders.micro_batcher import MicroBatcher
from mmserve.encoders.to_the_end import to_the_end
from mmserve.errors import EncoderFailed, EncoderUnavailable, MmserveError, Overloaded, TooLarge, WorkerDied, WorkerLost
from mmserve.metrics import Metrics
from mmserve.plan import EncodeItem, EncodePlan, EncodeResult

log = logging.getLogger(__name__)

MAX_DEATHS = 2  # an item that was aboard so many dying workers is tried alone once more


class EncoderClient(Protocol):
    """One encoder worker, through all its lives."""

    async def wait_ready(self) -> None:
        """Until there is a warm worker.  Raises WorkerDied only when there never will be one."""

    async def encode(self, plan: EncodePlan) -> EncodeResult:
        """Raises WorkerDied; then nothing more is written into the plan's rows."""


@dataclass(eq=False, slots=True)
class EncodeJob:
    """One window on its way through the queue.  Only the queue writes `aboard`, only its owner `wanted`."""

    decoder: str
    item: EncodeItem
    wanted: bool = True
    aboard: bool = False  # a worker may be writing the rows
    num_deaths: int = 0
    queued_s: float = 0.0
    gpu_s: float = 0.0  # its share of the forward pass that wrote its rows
    landed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EncodeQueue:
    """Owned by the event loop; one task for each client.  `on_death` is told of every batch that died with its worker."""

    def __init__(
        self,
        kind: str,
        clients: Sequence[EncoderClient],
        decoders: Iterable[str],
        metrics: Metrics,
        *,
        window_s: float,
        max_batch: int,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.refusal: Overloaded | None = None  # why nothing more is taken
        self._clients = clients
        self._on_death = on_death
        self._kind = kind
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._plan_ids = itertools.count(1)
        self._batchers = {name: MicroBatcher[EncodeJob](window_s, max_batch) for name in decoders}
        self._alone: deque[EncodeJob] = deque()  # suspects, one to a batch
        self._wake = asyncio.Event()
        self._servers = [asyncio.create_task(self._serve(client), name=f"encode-{kind}-{i}") for i, client in enumerate(clients)]

    def __len__(self) -> int:
        return len(self._alone) + sum(map(len, self._batchers.values()))

    async def close(self) -> None:
        """Whatever is queued or aboard ends with Overloaded."""
        self.refusal = Overloaded("the server is shutting down")
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        self.fail_queued(self.refusal)

    async def wait_ready(self) -> None:
        """Until there is a warm worker.  Raises EncoderUnavailable when there never will be one."""
        waiting = {asyncio.ensure_future(client.wait_ready()) for client in self._clients}
        errors: list[BaseException] = []
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                failed = [error for task in done if (error := task.exception()) is not None]
                if len(failed) < len(done):
                    return
                errors += failed
        finally:
            for task in waiting:
                task.cancel()
        raise EncoderUnavailable(f"no {self._kind} encoder is running") from errors[0]

    def fail_queued(self, error: MmserveError) -> None:
        """End whatever waits and is not aboard."""
        queued = [*self._alone, *itertools.chain.from_iterable(batcher.take_all() for batcher in self._batchers.values())]
        self._alone.clear()
        _fail(queued, error)

    async def encode(self, job: EncodeJob) -> None:
        """Until the rows are written and good.  Raises the error of this job alone; cancelled, returns when nobody writes any more."""
        if self.refusal is not None:
            raise self.refusal.again()
        job.queued_s = self._loop.time()
        self._batchers[job.decoder].add(job, job.queued_s)
        self._wake.set()
        try:
            await asyncio.shield(job.landed)
        except asyncio.CancelledError:
            if not self._withdraw(job):
                with suppress(MmserveError):
                    await to_the_end(job.landed)
            raise

    def _withdraw(self, job: EncodeJob) -> bool:
        if job in self._alone:
            self._alone.remove(job)
            return True
        return self._batchers[job.decoder].remove(job)

    async def _serve(self, client: EncoderClient) -> None:
        """One worker's days: the next batch when it is due, as long as there is a worker."""
        try:
            while True:
                await self._wait_due()
                await client.wait_ready()  # only then a batch leaves the queue, where it can still be withdrawn or refused
                if (batch := self._take()) is not None:
                    await self._serve_batch(client, *batch)
        except WorkerDied:
            log.error("pool=%s lost an encoder for good", self._kind)
            self._servers.remove(asyncio.current_task())  # type: ignore[arg-type]
            if not self._servers:
                self.refusal = EncoderUnavailable(f"no {self._kind} encoder is running")
                self.fail_queued(self.refusal)

    async def _serve_batch(self, client: EncoderClient, decoder: str, jobs: list[EncodeJob]) -> None:
        try:
            await self._run(client, decoder, jobs)
        except asyncio.CancelledError:
            _fail(jobs, Overloaded("the server is shutting down"))
            raise
        except Exception:
            log.exception("pool=%s a batch of %d could not be run", self._kind, len(jobs))
            _fail(jobs, EncoderFailed("the media could not be encoded"))

    async def _wait_due(self) -> None:
        while True:
            self._wake.clear()
            due_s = min((due_s for batcher in self._batchers.values() if (due_s := batcher.due_s) is not None), default=None)
            if self._alone or (due_s is not None and due_s <= self._loop.time()):
                return
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._wake.wait()

    def _take(self) -> tuple[str, list[EncodeJob]] | None:
        """The batch that is due, with its decoder; None if another worker took it."""
        if self._alone:
            job = self._alone.popleft()
            return job.decoder, _board([job])
        waiting = [(due_s, name) for name, batcher in self._batchers.items() if (due_s := batcher.due_s) is not None]
        for _, name in sorted(waiting):
            if jobs := self._batchers[name].take(self._loop.time()):
                return name, _board(jobs)
        return None

    async def _run(self, client: EncoderClient, decoder: str, jobs: list[EncodeJob]) -> None:
        """One forward pass; every job lands, goes back into the queue, or fails alone."""
        plan = EncodePlan(next(self._plan_ids), decoder, tuple(job.item for job in jobs))
        started_s = self._loop.time()
        try:
            result = await client.encode(plan)
        except WorkerDied:
            self._count_lost(self._loop.time() - started_s)
            self._requeue(decoder, jobs)
            self._on_death()  # last: who then wants no more encodes has all of them in the queue
            return
        self._report(jobs, started_s, result)
        self._share_out(jobs, result)
        too_big = []
        for job, code in zip(jobs, result.errors, strict=True):
            if code is None:
                job.landed.set_result(None)
            elif code == "out_of_memory":
                too_big.append(job)
            else:
                _fail([job], EncoderFailed("the encoder gave rows that must not be used", code=code))
        if len(jobs) == 1:
            _fail(too_big, TooLarge("the encoder has not enough memory for this item"))
            return
        half = (len(too_big) + 1) // 2
        for part in (too_big[:half], too_big[half:]):
            if part:
                await self._run(client, decoder, part)

    def _requeue(self, decoder: str, jobs: list[EncodeJob]) -> None:
        """Their worker died.  Once is bad luck; after a second time each is tried alone, so that one poisoned picture is found out."""
        again: list[EncodeJob] = []
        for job in jobs:
            job.num_deaths += 1
            job.aboard = False
            if job.num_deaths > MAX_DEATHS:
                _fail([job], WorkerLost("the media were aboard more dying encoders than chance explains"))
            elif not job.wanted:
                _fail([job], Overloaded("nobody waits for it any more"))
            elif job.num_deaths == MAX_DEATHS:
                self._alone.append(job)
            else:
                again.append(job)
        self._batchers[decoder].put_back(again, self._loop.time())
        self._wake.set()

    def _share_out(self, jobs: list[EncodeJob], result: EncodeResult) -> None:
        """Put a forward pass down to its items, by their rows.  What came to nothing is overhead."""
        num_rows = sum(job.item.rows.shape[0] for job in jobs)
        failed_s = 0.0
        for job, code in zip(jobs, result.errors, strict=True):
            share_s = result.seconds * job.item.rows.shape[0] / num_rows
            if code is None:
                job.gpu_s = share_s
            else:
                failed_s += share_s
        self._metrics.gpu_overhead_seconds.labels("failed_encode").inc(failed_s)

    def _count_lost(self, seconds: float) -> None:
        """With a worker that died."""
        self._metrics.gpu_seconds.labels("lost").inc(seconds)
        self._metrics.gpu_overhead_seconds.labels("dead_worker").inc(seconds)

    def _report(self, jobs: list[EncodeJob], started_s: float, result: EncodeResult) -> None:
        kind, metrics = self._kind, self._metrics
        metrics.encoder_items_per_batch.labels(kind).observe(len(jobs))
        metrics.encoder_forward_seconds.labels(kind).observe(result.seconds)
        metrics.gpu_seconds.labels(f"{kind}_encode").inc(result.seconds)
        for job in jobs:
            metrics.encoder_queue_wait_seconds.labels(kind).observe(started_s - job.queued_s)


def _board(jobs: list[EncodeJob]) -> list[EncodeJob]:
    for job in jobs:
        job.aboard = True
    return jobs


def _fail(jobs: list[EncodeJob], error: MmserveError) -> None:
    for job in jobs:
        if not job.landed.done():
            job.landed.set_exception(error)
