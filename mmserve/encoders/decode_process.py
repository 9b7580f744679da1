"""Decoding in processes that can be killed: a picture or clip that crashes, hangs or explodes its decoder costs one 4xx.

A child writes pixels and samples straight into the shared buffer.  So a call never returns, cancelled or not, while a child might
still write into its target: a cancelled job that is running is waited for, which its wall limit bounds.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

from mmserve.child_process import start_child
from mmserve.composition.picture_fit import PictureFit
from mmserve.encoders.decode_child import PIECE_BYTES, ChildReady, DecodeJob, JobDone
from mmserve.encoders.to_the_end import to_the_end
from mmserve.errors import MmserveError, Overloaded, UndecodableMedia, WorkerDied
from mmserve.media import AudioHeader, MediaItem, MediaKind, MediaLimits
from mmserve.shared_buffer import BufferSlice, SharedMemory
from mmserve.transport import Channel

log = logging.getLogger(__name__)

TARGET = "mmserve.encoders.decode_child:run"
START_TIMEOUT_S = 30.0
PAUSE_S = 1.0  # between attempts to start a child that did not come up


class _Child:
    """One life of one decode process."""

    def __init__(self, process: BaseProcess, channel: Channel) -> None:
        self._process = process
        self._channel = channel
        self.died = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(process.sentinel, self._note_death)

    @classmethod
    async def spawn(cls, target: str, memory: SharedMemory, limits: MediaLimits) -> _Child:
        """A child that reported ready.  Raises WorkerDied."""
        process, end = start_child(target, (memory, limits), name="mmserve-decode")
        try:
            child = cls(process, await Channel.open(end))
        except BaseException:
            end.close()
            process.kill()
            process.join()
            raise
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await child._channel.receive()
            assert isinstance(ready, ChildReady)
        except TimeoutError:
            await child.bury()
            raise WorkerDied("decode child was not ready in time") from None
        except BaseException:
            await child.bury()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def is_alive(self) -> bool:
        return not self.died.is_set() and self._process.is_alive()

    async def call(self, job: DecodeJob, data: bytes) -> JobDone:
        """Raises WorkerDied."""
        await self._channel.send(job)
        for start in range(0, len(data), PIECE_BYTES):
            await self._channel.send(data[start : start + PIECE_BYTES])
        reply = await self._channel.receive()
        assert isinstance(reply, JobDone)
        return reply

    async def bury(self) -> int | None:
        """Kill it if need be, wait until the kernel has taken it away, and return its exit code.  Idempotent."""
        if self._process.is_alive():
            self._process.kill()
        try:
            await to_the_end(self.died.wait())
        finally:
            self._channel.close()
            self._process.join()
        return self._process.exitcode

    def _note_death(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self.died.set()


@dataclass(eq=False)
class _Entry:
    """One job on its way.  `finished` means that no child touches its target any more."""

    job: DecodeJob
    data: bytes
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: bool = False
    running: bool = False
    retried: bool = False
    reply: JobDone | None = None
    error: MmserveError | None = None


class DecodeProcesses:
    """`count` children, each with a lane of its own; jobs wait in one queue, first come, first served."""

    def __init__(self, memory: SharedMemory, limits: MediaLimits, count: int = 1, *, target: str = TARGET) -> None:
        self.num_deaths = 0  # children that crashed, hung or exploded
        self._memory = memory
        self._limits = limits
        self._count = count
        self._target = target
        self._queue: asyncio.Queue[_Entry] = asyncio.Queue()
        self._lanes: list[asyncio.Task[None]] = []
        self._children: set[_Child] = set()
        self._running: set[_Entry] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    async def start(self) -> None:
        """Until every lane has a child that is ready."""
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._count)]
        self._lanes = [asyncio.create_task(self._lane(future), name=f"decode-lane-{i}") for i, future in enumerate(ready)]
        await asyncio.gather(*ready)

    async def close(self) -> None:
        self._closed = True
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        while not self._queue.empty():
            self._fail(self._queue.get_nowait(), Overloaded("the server is shutting down"))

    async def probe_audio(self, item: MediaItem) -> AudioHeader:
        """The clip's true length.  Raises the 4xx that says why it can't be taken."""
        reply = await self._submit(DecodeJob(MediaKind.AUDIO, len(item.data), param=item.param), item.data)
        assert reply.header is not None
        return reply.header

    async def decode_image(self, item: MediaItem, target: BufferSlice, fit: PictureFit) -> None:
        """Write the picture into `target`, uint8 of the fit's feature shape.  Raises UndecodableMedia and its kin."""
        await self._submit(DecodeJob(MediaKind.IMAGE, len(item.data), target, fit, param=item.param), item.data)

    async def decode_audio(self, item: MediaItem, target: BufferSlice, sample_rate: int = 16_000) -> None:
        """Write the clip into `target`, float32 [samples at `sample_rate`].  Raises UndecodableMedia and its kin."""
        await self._submit(DecodeJob(MediaKind.AUDIO, len(item.data), target, sample_rate=sample_rate, param=item.param), item.data)

    async def _submit(self, job: DecodeJob, data: bytes) -> JobDone:
        if self._closed:
            raise Overloaded("the server is shutting down")
        entry = _Entry(job, data)
        self._queue.put_nowait(entry)
        try:
            await entry.finished.wait()
        except asyncio.CancelledError:
            entry.abandoned = True
            if entry.running:
                await to_the_end(entry.finished.wait())
            raise
        if entry.error is not None:
            raise entry.error
        assert entry.reply is not None
        if entry.reply.error is not None:
            raise entry.reply.error
        return entry.reply

    async def _lane(self, ready: asyncio.Future[None]) -> None:
        """One child after another, for ever.  Every entry taken is finished, whatever happens."""
        while True:
            try:
                child = await _Child.spawn(self._target, self._memory, self._limits)
            except (WorkerDied, OSError) as error:
                log.error("decode child did not start (%s)", error)
                self._fail_waiting()
                await asyncio.sleep(PAUSE_S)
                continue
            self._children.add(child)
            if not ready.done():
                ready.set_result(None)
            try:
                await self._feed(child)
            finally:
                self._children.discard(child)
                await child.bury()

    async def _feed(self, child: _Child) -> None:
        """Jobs into `child` until its life is over."""
        while True:
            entry = await self._next(child)
            if entry is None:
                log.warning("decode child pid=%d died idle", child.pid)
                await asyncio.sleep(PAUSE_S)
                return
            if entry.abandoned:
                continue
            entry.running = True
            self._running.add(entry)
            try:
                if not await self._run(child, entry):
                    return
            finally:
                self._running.discard(entry)
                if entry.running and not entry.finished.is_set():
                    await child.bury()
                    self._fail(entry, Overloaded("the server is shutting down"))

    async def _next(self, child: _Child) -> _Entry | None:
        """The next job; None if `child` is dead, which is no job's fault."""
        getting = asyncio.create_task(self._queue.get())
        dying = asyncio.create_task(child.died.wait())
        taken = False
        try:
            await asyncio.wait({getting, dying}, return_when=asyncio.FIRST_COMPLETED)
            taken = getting.done() and child.is_alive()
            return getting.result() if taken else None
        finally:
            dying.cancel()
            if not getting.cancel() and not taken:
                self._queue.put_nowait(getting.result())

    async def _run(self, child: _Child, entry: _Entry) -> bool:
        """Do one job.  True if the child can take another."""
        try:
            async with asyncio.timeout(self._limits.decode_wall_s):
                entry.reply = await child.call(entry.job, entry.data)
        except (WorkerDied, TimeoutError) as error:
            self.num_deaths += 1
            hung = isinstance(error, TimeoutError)
            code = await child.bury()
            log.warning("decode child pid=%d died signal=%d hung=%s bytes=%d", child.pid, -(code or 0), hung, len(entry.data))
            if code == -signal.SIGKILL and not hung and not entry.retried:  # from outside: not this job's fault
                entry.retried, entry.running = True, False
                self._queue.put_nowait(entry)
            else:
                self._fail(entry, _verdict(hung or code == -signal.SIGXCPU, entry.job.param))
            return False
        entry.finished.set()
        return not entry.reply.last

    def _fail_waiting(self) -> None:
        while not self._queue.empty():
            self._fail(self._queue.get_nowait(), Overloaded("media can't be decoded at the moment"))

    @staticmethod
    def _fail(entry: _Entry, error: MmserveError) -> None:
        entry.error = error
        entry.finished.set()


def _verdict(slow: bool, param: str | None) -> MmserveError:
    reason = "it takes too long" if slow else "it broke its decoder"
    return UndecodableMedia(f"the media can't be decoded: {reason}", param=param)
