"""One modality's encoders: whoever needs the rows of a window gets them, from the cache, from an encode under way, or from a new one.

Work belongs to the pool, not to who asked first: a caller that leaves or a neighbour whose picture is broken hurts nobody else.  Rows
are cached only when they are complete and finite, and are pinned for each caller before it wakes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from mmserve.composition import Composition
from mmserve.composition.picture_fit import PictureFit
from mmserve.encoders.embedding_cache import EmbeddingCache
from mmserve.encoders.encode_queue import EncodeJob, EncodeQueue, EncoderClient
from mmserve.encoders.to_the_end import to_the_end
from mmserve.errors import EncoderFailed, MmserveError, Overloaded
from mmserve.media import MediaItem, MediaKind, MediaWindow, PreparedMedia
from mmserve.metrics import Metrics
from mmserve.plan import EncodeItem
from mmserve.shared_buffer import BufferSlice, SharedBuffer

log = logging.getLogger(__name__)

ROOM_TIMEOUT_S = 10.0  # waiting for space in the shared buffer before the caller is told to come back


class MediaDecoder(Protocol):
    """`decode_process.DecodeProcesses`, as far as a pool needs it."""

    async def decode_image(self, item: MediaItem, target: BufferSlice, fit: PictureFit) -> None: ...

    async def decode_audio(self, item: MediaItem, target: BufferSlice, sample_rate: int) -> None: ...


@dataclass(eq=False)
class _Flight:
    """Rows on their way for everybody in `waiters`."""

    media: PreparedMedia
    window: MediaWindow
    decoder: str
    waiters: list[asyncio.Future[str]] = field(default_factory=list)
    source: str = "encoded"
    job: EncodeJob | None = None
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _Decode:
    """One item's features, shared by the windows cut from it."""

    task: asyncio.Task[BufferSlice]
    num_users: int = 0


class EncoderPool:
    """Owned by the event loop.  `clients` may be empty for a moment, never for good."""

    def __init__(
        self,
        kind: MediaKind,
        clients: Sequence[EncoderClient],
        decode: MediaDecoder,
        cache: EmbeddingCache,
        buffer: SharedBuffer,
        metrics: Metrics,
        *,
        composition: Composition,
        rows_dtype: str,
        window_s: float = 0.012,
        max_batch: int = 48,
    ) -> None:
        assert cache.buffer is buffer, "features and rows live in one buffer"
        self._kind = kind
        self._decode_process = decode
        self._cache = cache
        self._metrics = metrics
        self._composition = composition
        self._rows_dtype = rows_dtype
        self._loop = asyncio.get_running_loop()
        self._flights: dict[bytes, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # of flights, forgotten ones too
        self._decodes: dict[tuple[bytes, PictureFit | int], _Decode] = {}  # by content and by what decoding is asked for
        self._queue = EncodeQueue(kind.value, clients, composition.decoders, metrics, window_s=window_s, max_batch=max_batch)

    def acquire(self, window: MediaWindow) -> bool:
        """Pin rows that are in memory already, once for the caller.  Without waiting, and without starting anything."""
        if not self._cache.acquire(window.key):
            return False
        self._metrics.mm_cache_queries.labels(self._kind.value).inc()
        self._note_hit(window, "memory")
        return True

    async def fetch(self, media: PreparedMedia, window: MediaWindow, decoder: str) -> str:
        """Rows of `window` for `decoder` are in memory and pinned once for the caller, who unpins.

        Returns where they came from: memory, disk, joined or encoded.  Raises the MmserveError of whatever went wrong.
        """
        if self.acquire(window):
            return "memory"
        self._metrics.mm_cache_queries.labels(self._kind.value).inc()
        if self._queue.refusal is not None:
            raise Overloaded(self._queue.refusal)
        flight, leads = self._flights.get(window.key), False
        if flight is None:
            flight, leads = self._launch(media, window, decoder), True
        else:
            self._metrics.single_flight_joins.labels(self._kind.value).inc()
            if flight.job is not None:
                flight.job.wanted = True
        waiter: asyncio.Future[str] = self._loop.create_future()
        flight.waiters.append(waiter)
        try:
            source = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._cache.unpin(window.key)  # it landed, and we were cancelled before we woke
            self._leave(flight, waiter)
            raise
        except MmserveError as error:  # an own copy: the others' names another place in another request
            param = None if error.param is None else media.item.param
            raise type(error)(error.message, param=param, code=error.code, retry_after_s=error.retry_after_s) from None
        if leads and source == "disk":
            self._note_hit(window, "disk")
        return source if leads else "joined"

    async def close(self) -> None:
        """Whoever still waits gets Overloaded."""
        await self._queue.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(shared.task for shared in self._decodes.values()), return_exceptions=True)

    def check(self) -> None:
        """Idle books: nothing under way, nothing held."""
        assert not self._flights
        assert not self._decodes
        assert not len(self._queue)

    def _launch(self, media: PreparedMedia, window: MediaWindow, decoder: str) -> _Flight:
        flight = self._flights[window.key] = _Flight(media, window, decoder)
        flight.task = asyncio.create_task(self._fly(flight), name=f"fly-{window.key.hex()[:12]}")
        self._tasks.add(flight.task)
        flight.task.add_done_callback(self._tasks.discard)
        return flight

    def _leave(self, flight: _Flight, waiter: asyncio.Future[str]) -> None:
        """A caller is gone.  The last one takes the flight with it, unless the encoder has it already."""
        if waiter in flight.waiters:
            flight.waiters.remove(waiter)
        if flight.waiters or flight.task is None or flight.task.done():
            return
        if flight.job is not None and flight.job.aboard:
            flight.job.wanted = False
        else:
            self._forget(flight)
            flight.task.cancel()

    def _forget(self, flight: _Flight) -> None:
        if self._flights.get(flight.window.key) is flight:
            del self._flights[flight.window.key]

    async def _fly(self, flight: _Flight) -> None:
        """From nothing to rows in the cache, and everybody told."""
        error: MmserveError | None = None
        try:
            await self._bring(flight)
        except MmserveError as failure:
            error = failure
        except asyncio.CancelledError:
            error = Overloaded("the server is shutting down")
        except Exception:
            log.exception("window=%s could not be encoded", flight.window.key.hex()[:12])
            error = EncoderFailed("the media could not be encoded")
        self._forget(flight)
        for waiter in flight.waiters:
            if waiter.done():  # cancelled a moment ago
                continue
            if error is not None:
                waiter.set_exception(error)
            else:
                self._cache.pin(flight.window.key)
                waiter.set_result(flight.source)
        flight.waiters.clear()

    async def _bring(self, flight: _Flight) -> None:
        window, cache = flight.window, self._cache
        hidden = self._composition.decoders[flight.decoder].hidden_size
        rows = await cache.allocate((window.num_rows, hidden), self._rows_dtype, ROOM_TIMEOUT_S)
        try:
            left_s = await to_the_end(cache.load(window, rows))
            if left_s is None:
                async with self._features(flight.media, window, flight.decoder) as features:
                    flight.job = EncodeJob(flight.decoder, EncodeItem(features, rows, flight.media.picture_size))
                    await self._queue.encode(flight.job)
        except BaseException:
            cache.release(rows)
            raise
        flight.source = "encoded" if left_s is None else "disk"
        cache.insert(window, rows, left_s)
        if left_s is None:
            cache.save(window)

    @asynccontextmanager
    async def _features(self, media: PreparedMedia, window: MediaWindow, decoder: str) -> AsyncIterator[BufferSlice]:
        """Pixels of the picture, or the window's samples.  An item is decoded once, however many windows of it are on their way."""
        wanted = self._wanted(decoder)
        shared = self._decodes.get((media.content, wanted))
        if shared is None:
            shared = _Decode(asyncio.create_task(self._decode(media, wanted), name="decode-media"))
            self._decodes[media.content, wanted] = shared
        shared.num_users += 1
        try:
            whole = await asyncio.shield(shared.task)
            yield whole if window.kind is MediaKind.IMAGE else _cut(whole, window)
        finally:
            shared.num_users -= 1
            if shared.num_users == 0:
                del self._decodes[media.content, wanted]
                shared.task.cancel()  # nothing to a task that is done; one that isn't gives its memory back itself
                shared.task.add_done_callback(self._release_features)

    def _release_features(self, task: asyncio.Task[BufferSlice]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._cache.release(task.result())

    def _wanted(self, decoder: str) -> PictureFit | int:
        """What pictures are fitted by, or the rate that clips are brought to, Hz."""
        if self._kind is MediaKind.IMAGE:
            return self._composition.vision[decoder].fit
        return self._composition.audio[decoder].sample_rate

    async def _decode(self, media: PreparedMedia, wanted: PictureFit | int) -> BufferSlice:
        features = await self._cache.allocate(*_place(media, wanted), ROOM_TIMEOUT_S)
        try:
            if isinstance(wanted, int):
                await self._decode_process.decode_audio(media.item, features, wanted)
            else:
                await self._decode_process.decode_image(media.item, features, wanted)
        except BaseException:
            self._cache.release(features)
            raise
        return features

    def _note_hit(self, window: MediaWindow, tier: str) -> None:
        self._metrics.mm_cache_hits.labels(self._kind.value, tier).inc()
        self._cache.note_hit(window, tier)


def _place(media: PreparedMedia, wanted: PictureFit | int) -> tuple[tuple[int, ...], str]:
    """Shape and type of an item's features."""
    if isinstance(wanted, int):
        return (media.num_samples,), "float32"
    assert media.picture_size is not None, "a clip has no fit"
    return wanted.feature_shape(*media.picture_size), "uint8"


def _cut(clip: BufferSlice, window: MediaWindow) -> BufferSlice:
    """The window's samples within the clip's."""
    return BufferSlice(clip.offset + 4 * window.start, (window.stop - window.start,), clip.dtype)
