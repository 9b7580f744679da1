"""One encoder worker through all its lives, as an encoder's queue calls it; a worker that hangs is found out and killed."""

from __future__ import annotations

import asyncio

from mmserve.encoders.encode_time import EncodeTime
from mmserve.errors import WorkerDied
from mmserve.plan import EncodePlan, EncodeResult, EncoderReady
from mmserve.supervisor import Worker


class SupervisedEncoder:
    """What an encoder pool calls: the current life of one encoder worker, waited for while there is none."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._ready = asyncio.Event()
        self._time = EncodeTime()

    @property
    def alive(self) -> bool:
        return self._worker is not None

    async def serve(self, worker: Worker, ready: EncoderReady) -> None:
        self._worker = worker
        self._ready.set()
        try:
            await worker.died.wait()
        finally:
            self._bury(worker)
        raise WorkerDied("encoder ended")

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def encode(self, plan: EncodePlan) -> EncodeResult:
        """Raises WorkerDied."""
        await self._ready.wait()
        worker = self._worker
        assert worker is not None, "ready without a worker"
        try:
            result = await worker.call(plan, self._time.timeout_s(plan.items))
        except WorkerDied:
            self._bury(worker)  # it may be some time until its process is gone, in which it would seem to die again and again
            raise
        assert isinstance(result, EncodeResult), f"unexpected reply {type(result).__name__}"
        self._time.note(plan.items, result.seconds)
        return result

    def _bury(self, worker: Worker) -> None:
        if self._worker is worker:
            self._worker = None
            self._ready.clear()
