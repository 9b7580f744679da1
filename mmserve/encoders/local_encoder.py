"""Rows from workers of our own: an item is decoded in a process that may be killed, then its windows join a batch.

An item is decoded once, however many windows of it are on their way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from mmserve.composition import Composition
from mmserve.composition.picture_fit import PictureFit
from mmserve.encoders.embedding_cache import EmbeddingCache
from mmserve.encoders.encode_order import ROOM_TIMEOUT_S, EncodeOrder
from mmserve.encoders.encode_queue import EncodeJob, EncodeQueue, EncoderClient
from mmserve.encoders.encoder_health import EncoderHealth
from mmserve.encoders.shared_work import SharedWork
from mmserve.errors import MmserveError
from mmserve.media import MediaItem, MediaKind, MediaWindow, PreparedMedia
from mmserve.metrics import Metrics
from mmserve.plan import EncodeItem
from mmserve.shared_buffer import BufferSlice

BLANK_SIDE = 32  # pixels of the picture that probes encode
BLANK_S = 0.1  # and seconds of the clip


class MediaDecoder(Protocol):
    """`decode_process.DecodeProcesses`, as far as an encoder needs it."""

    async def decode_image(self, item: MediaItem, target: BufferSlice, fit: PictureFit) -> None: ...

    async def decode_audio(self, item: MediaItem, target: BufferSlice, sample_rate: int) -> None: ...


class LocalEncoder:
    """Owned by the event loop.  `clients` may be without workers for a moment, never for good."""

    def __init__(
        self,
        kind: MediaKind,
        clients: Sequence[EncoderClient],
        decode: MediaDecoder,
        cache: EmbeddingCache,
        metrics: Metrics,
        *,
        composition: Composition,
        rows_dtype: str,
        window_s: float = 0.012,
        max_batch: int = 48,
    ) -> None:
        self._kind = kind
        self._decode_process = decode
        self._cache = cache
        self._metrics = metrics
        self._composition = composition
        self._rows_dtype = rows_dtype
        self._decodes = SharedWork[tuple[bytes, PictureFit | int], BufferSlice](cache.release)  # by content and what it is decoded to
        self._health: EncoderHealth | None = None
        self._queue = EncodeQueue(
            kind.value, clients, composition.decoders, metrics, window_s=window_s, max_batch=max_batch, on_death=self._note_death
        )

    def report_to(self, health: EncoderHealth) -> None:
        self._health = health

    async def make(self, order: EncodeOrder) -> None:
        async with self._features(order.media, order.window, order.decoder) as features:
            order.job = EncodeJob(order.decoder, EncodeItem(features, order.rows, order.media.picture_size))
            await self._queue.encode(order.job)

    async def wait_ready(self) -> None:
        await self._queue.wait_ready()

    async def probe(self) -> None:
        """A black picture or a silent clip, for one decoder: the tower is the same for all."""
        decoder = next(iter(self._composition.encoders(self._kind)))
        size = (BLANK_SIDE, BLANK_SIDE) if self._kind is MediaKind.IMAGE else None
        shape: tuple[int, ...]
        if size is not None:
            fit = self._composition.vision[decoder].fit
            shape, dtype, num_rows = fit.feature_shape(*size), "uint8", fit.num_rows(*size)
        else:
            audio = self._composition.audio[decoder]
            num_samples = int(BLANK_S * audio.sample_rate)
            shape, dtype, num_rows = (num_samples,), "float32", audio.num_rows(num_samples)
        hidden = self._composition.decoders[decoder].hidden_size
        features = await self._cache.allocate(shape, dtype, ROOM_TIMEOUT_S)
        try:
            rows = await self._cache.allocate((num_rows, hidden), self._rows_dtype, ROOM_TIMEOUT_S)
            try:
                self._cache.buffer.array(features)[...] = 0
                job = EncodeJob(decoder, EncodeItem(features, rows, size))
                await self._queue.encode(job)
                self._metrics.gpu_overhead_seconds.labels("probe").inc(job.gpu_s)
            finally:
                self._cache.release(rows)
        finally:
            self._cache.release(features)

    def fail_waiting(self, error: MmserveError) -> None:
        self._queue.fail_queued(error)

    async def close(self) -> None:
        await self._queue.close()
        await self._decodes.close()

    def check(self) -> None:
        """Idle books: nothing under way."""
        assert not len(self._decodes)
        assert not len(self._queue)

    def _note_death(self) -> None:
        if self._health is not None:
            self._health.failed("worker_died")

    @asynccontextmanager
    async def _features(self, media: PreparedMedia, window: MediaWindow, decoder: str) -> AsyncIterator[BufferSlice]:
        """Pixels of the picture, or the window's samples."""
        wanted = self._wanted(decoder)
        async with self._decodes.result((media.content, wanted), lambda: self._decode(media, wanted)) as whole:
            yield whole if window.kind is MediaKind.IMAGE else _cut(whole, window)

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


def _place(media: PreparedMedia, wanted: PictureFit | int) -> tuple[tuple[int, ...], str]:
    """Shape and type of an item's features."""
    if isinstance(wanted, int):
        return (media.num_samples,), "float32"
    assert media.picture_size is not None, "a clip has no fit"
    return wanted.feature_shape(*media.picture_size), "uint8"


def _cut(clip: BufferSlice, window: MediaWindow) -> BufferSlice:
    """The window's samples within the clip's."""
    return BufferSlice(clip.offset + 4 * window.start, (window.stop - window.start,), clip.dtype)
