"""Everything a request's media meet on their way to rows: header, digest, decode process, encoder, embedding cache.

The scheduler knows none of it; the engine knows only `prepare`, `room` and `fetch`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from mmserve.composition import Composition
from mmserve.composition.prepare import prepare_media
from mmserve.config import Config
from mmserve.encoder_lanes import EncoderLane, EncoderLanes
from mmserve.encoders.decode_process import DecodeProcesses
from mmserve.encoders.disk_tier import DiskTier
from mmserve.encoders.embedding_cache import CacheEvent, EmbeddingCache
from mmserve.encoders.encoder_pool import Pay
from mmserve.encoders.image_header import read_header
from mmserve.errors import TooLarge
from mmserve.hit_watch import HitWatch
from mmserve.media import AudioHeader, ImageHeader, MediaItem, MediaKind, MediaWindow, PreparedMedia, content_digest
from mmserve.media_room import MediaRoom
from mmserve.metrics import Metrics
from mmserve.quarantine import Quarantine
from mmserve.shared_buffer import ITEM_SIZE, SharedBuffer
from mmserve.supervisor import Supervisor

log = logging.getLogger(__name__)

SMALL_BYTES = 64 * 1024  # hashed on the loop: well under a millisecond
MAX_CLIP_HEADERS = 4096  # clips whose length is remembered
SHARE_FOR_REQUESTS = 0.8  # of the shared buffer; the rest lets rows of the past stay while new ones land


class MediaService:
    """Started and closed by the engine."""

    def __init__(
        self,
        config: Config,
        composition: Composition,
        buffer: SharedBuffer,
        metrics: Metrics,
        *,
        cache_dir: Path,
        rows_dtype: str,
        on_restart: Callable[[str], None],
        on_cache_event: Callable[[CacheEvent], None],
    ) -> None:
        self._config = config
        self._composition = composition
        self._buffer = buffer
        self._metrics = metrics
        self._cache_dir = cache_dir
        self._rows_dtype = rows_dtype
        self._on_restart = on_restart
        self._on_cache_event = on_cache_event
        self._quarantine = Quarantine()  # by content
        self.room = MediaRoom(int(buffer.memory.num_bytes * SHARE_FOR_REQUESTS))
        self._watch = HitWatch(num_inherited=0)
        self._clip_headers: dict[bytes, AudioHeader] = {}  # by content, oldest first
        self.supervisors: list[Supervisor] = []  # of all encoder workers
        self._lanes: dict[MediaKind, tuple[EncoderLane, ...]] = {}

    @asynccontextmanager
    async def running(self, devices: dict[MediaKind, tuple[str, ...]], num_threads: int) -> AsyncIterator[None]:
        """Decode processes and pools are up inside; encoder workers may still be loading."""
        config, buffer = self._config, self._buffer
        on_cpu = "cpu" in itertools.chain.from_iterable(devices.values())
        max_batch = config.encoder.max_encoder_batch or (1 if on_cpu else 48)
        async with AsyncExitStack() as stack:
            size = config.storage.embedding_disk_bytes
            on_corrupt, on_timeout = self._metrics.cache_corrupt.inc, self._metrics.cache_disk_timeouts.inc
            disk = DiskTier(self._cache_dir, size, on_corrupt=on_corrupt, on_timeout=on_timeout) if size else None
            if disk is not None:
                self._watch = HitWatch(await disk.open())
            self.decode = DecodeProcesses(buffer.memory, config.limits, config.encoder.decode_processes)
            self.cache = EmbeddingCache(
                buffer,
                disk,
                ttl_s={MediaKind.IMAGE: config.storage.image_ttl_s, MediaKind.AUDIO: config.storage.audio_ttl_s},
                on_event=self._note_cache_event,
            )
            stack.push_async_callback(self.cache.close)
            await self.decode.start()
            stack.push_async_callback(self.decode.close)
            lanes = EncoderLanes(
                config.encoder,
                self.decode,
                self.cache,
                buffer,
                self._metrics,
                rows_dtype=self._rows_dtype,
                num_threads=num_threads,
                max_batch=max_batch,
                on_restart=self._on_restart,
                on_lost=lambda content: self._quarantine.add(content, time.monotonic()),
                supervisors=self.supervisors,
            )
            stack.push_async_callback(self._close_workers)
            for kind in MediaKind:
                if self._composition.encoders(kind):
                    self._lanes[kind] = await lanes.open(kind, self._composition, devices[kind], stack)
            yield

    async def _close_workers(self) -> None:
        """All at once: each may take its time to go."""
        await asyncio.gather(*(supervisor.close() for supervisor in self.supervisors))

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """That some decoder takes."""
        return tuple(self._lanes)

    def works(self, kind: MediaKind) -> bool:
        """Whether an encoder of this kind, or its fallback, takes work now."""
        return any(lane.works for lane in self._lanes[kind])

    async def prepare(self, item: MediaItem, decoder: str, salt: bytes) -> PreparedMedia:
        """Digest, header, counts; nothing is decoded.  Raises the error of whatever limit the item breaks.

        Here it is chosen who encodes it: the keys of its rows say so.  Raises EncoderUnavailable when nobody can now.
        """
        media = await self._prepare(item, decoder, salt)
        now_s = time.monotonic()
        for window in media.windows:
            self._flag(self._watch.asked(window.key, media.content, now_s), now_s)
        return media

    async def _prepare(self, item: MediaItem, decoder: str, salt: bytes) -> PreparedMedia:
        content = content_digest(item.data) if len(item.data) <= SMALL_BYTES else await asyncio.to_thread(content_digest, item.data)
        self._quarantine.check(content, time.monotonic(), param=item.param)
        header = await self._read_header(item, content, decoder)
        for is_fallback, lane in enumerate(self._lanes[item.kind]):
            composition = lane.pool.composition
            if is_fallback and decoder not in composition.encoders(item.kind):
                continue
            media = prepare_media(item, content, header, composition, decoder, salt=salt, is_fallback=bool(is_fallback))
            if await lane.pool.can_serve(media):
                return media
        raise self._lanes[item.kind][0].pool.health.refusal(item.param)

    async def _read_header(self, item: MediaItem, content: bytes, decoder: str) -> ImageHeader | AudioHeader:
        if item.kind is MediaKind.IMAGE:
            self._composition.vision_of(decoder, item.param)
            return read_header(item.data, self._config.limits, item.param)
        self._composition.audio_of(decoder, item.param)
        clip = self._clip_headers.get(content)
        if clip is None:
            clip = await self.decode.probe_audio(item)  # decodes all of it, to count
            if len(self._clip_headers) >= MAX_CLIP_HEADERS:
                del self._clip_headers[next(iter(self._clip_headers))]
            self._clip_headers[content] = clip
        return clip

    def check_pixels(self, media: tuple[PreparedMedia, ...]) -> None:
        """Raises TooLarge when the pictures are too much together."""
        pixels = sum(item.header.width * item.header.height for item in media if isinstance(item.header, ImageHeader))
        limit = self._config.limits.max_request_pixels
        if pixels > limit:
            raise TooLarge(f"pictures of one request may have {limit} pixels together, got {pixels}", param="messages")

    def num_bytes(self, media: tuple[PreparedMedia, ...], decoders: Sequence[str]) -> int:
        """Shared memory a request may need: features and rows of every window, for all of these.  Raises TooLarge when it never fits."""
        row_bytes = sum(self._composition.decoders[decoder].hidden_size for decoder in decoders) * ITEM_SIZE[self._rows_dtype]
        total = sum(item.num_rows * row_bytes + self._feature_bytes(item, decoders[0]) for item in media)
        if total > self.room.num_bytes:
            raise TooLarge(f"media of one request may take {self.room.num_bytes} bytes of memory, these take {total}", param="messages")
        return total

    def _feature_bytes(self, item: PreparedMedia, decoder: str) -> int:
        if item.picture_size is None:
            return 4 * item.num_samples
        fit = self._lane(item).pool.composition.vision_of(decoder).fit
        return math.prod(fit.feature_shape(*item.picture_size))

    def acquire(self, window: MediaWindow) -> bool:
        """Pin rows that are in memory already for the caller."""
        return self._lanes[window.kind][0].pool.acquire(window)

    async def fetch(self, media: PreparedMedia, window: MediaWindow, decoder: str, pay: Pay | None = None) -> str:
        """Rows of the window are in the cache and pinned for the caller.  Returns where they came from; `pay` hears of an encode."""
        return await self._lane(media).pool.fetch(media, window, decoder, pay)

    def is_open(self, media: PreparedMedia) -> bool:
        """Whether the breaker of the item's encoder is open, so that it would now be prepared for another, or refused."""
        return not self._lane(media).pool.health.is_closed

    def _lane(self, media: PreparedMedia) -> EncoderLane:
        return self._lanes[media.item.kind][media.is_fallback]

    def _note_cache_event(self, event: CacheEvent) -> None:
        if event.what == "hit":
            now_s = time.monotonic()
            self._flag(self._watch.hit(event.key, now_s), now_s)
        self._on_cache_event(event)

    def _flag(self, unexplained: bool, now_s: float) -> None:
        """A poisoned or broken cache shows in hits that nothing explains."""
        if not unexplained:
            return
        self._metrics.cache_unexplained_hits.inc()
        if alarm := self._watch.alarm(now_s):
            self._metrics.cache_hit_rate_alarms.inc()
            log.warning(
                "embedding cache: unexplained=%d hits=%d lookups=%d last_s=%g; is it poisoned, or another server's too?",
                alarm.num_unexplained, alarm.num_hits, alarm.num_lookups, alarm.span_s,
            )  # fmt: skip
