"""Everything a request's media meet on their way to rows: header, digest, decode process, encoder, embedding cache.

The scheduler knows none of it; the engine knows only `prepare`, `room` and `fetch`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from mmserve.composition import Canary, Composition, beside
from mmserve.composition.prepare import prepare_media
from mmserve.config import Config, chosen_device, replica_devices
from mmserve.encoder_lanes import EncoderLane, EncoderLanes
from mmserve.encoders.decode_process import DecodeProcesses
from mmserve.encoders.disk_tier import DiskTier
from mmserve.encoders.embedding_cache import CacheEvent, EmbeddingCache
from mmserve.encoders.encoder_pool import Pay
from mmserve.encoders.image_header import read_header
from mmserve.errors import EncoderUnavailable, TooLarge
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
        canaries: Mapping[str, Canary],  # by name
    ) -> None:
        self._config = config
        self._canaries = canaries
        self._stable = composition
        self._composition = beside(composition, self._canaries)
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
        self._own_lanes: dict[tuple[str, MediaKind], tuple[EncoderLane, ...]] = {}  # of canaries whose rows differ

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
            lanes = self._opener = EncoderLanes(
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
                if self._stable.encoders(kind):
                    self._lanes[kind] = await lanes.open(kind, self._stable, devices[kind], stack)
            yield

    @asynccontextmanager
    async def running_beside(self, canary: Canary) -> AsyncIterator[list[EncoderLane]]:
        """The encoders that are the canary's own are ready inside; it is told what it needs to be judged.  Raises WorkerFailedToStart.

        Whatever they do to themselves says nothing about the media: nothing is quarantined.
        """
        supervisors: list[Supervisor] = []
        device = replica_devices(self._config.canary.canary_devices, chosen_device(self._config.model.device), 1, "canary-devices")[0]
        opener = replace(self._opener, supervisors=supervisors, on_lost=lambda content: None)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(lambda: close_all(supervisors))
            for kind in canary.own_kinds:
                lane = await opener.open_local(f"{kind.value}-{canary.name}", kind, canary.composition, device, stack)
                self._own_lanes[canary.name, kind] = (lane,)
                stack.callback(self._own_lanes.pop, (canary.name, kind))
            await asyncio.gather(*(supervisor.first_ready() for supervisor in supervisors))
            yield [lane for (name, _), (lane,) in self._own_lanes.items() if name == canary.name]

    async def _close_workers(self) -> None:
        await close_all(self.supervisors)

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
        lanes, served = self._encoders_of(item.kind, decoder)
        for is_fallback, lane in enumerate(lanes):
            composition = lane.pool.composition
            if is_fallback and served not in composition.encoders(item.kind):
                continue
            media = prepare_media(item, content, header, composition, served, salt=salt, is_fallback=bool(is_fallback))
            if await lane.pool.can_serve(media):
                return media
        raise lanes[0].pool.health.refusal(item.param)

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
        lane, served = self._encoder_of(item, decoder)
        fit = lane.pool.composition.vision_of(served).fit
        return math.prod(fit.feature_shape(*item.picture_size))

    def acquire(self, window: MediaWindow) -> bool:
        """Pin rows that are in memory already for the caller."""
        return self._lanes[window.kind][0].pool.acquire(window)

    async def fetch(self, media: PreparedMedia, window: MediaWindow, decoder: str, pay: Pay | None = None) -> str:
        """Rows of the window are in the cache and pinned for the caller.  Returns where they came from; `pay` hears of an encode."""
        lane, served = self._encoder_of(media, decoder)
        return await lane.pool.fetch(media, window, served, pay)

    def is_open(self, media: PreparedMedia, decoder: str) -> bool:
        """Whether the breaker of the item's encoder is open, so that it would now be prepared for another, or refused."""
        return not self._encoder_of(media, decoder)[0].pool.health.is_closed

    def _encoder_of(self, media: PreparedMedia, decoder: str) -> tuple[EncoderLane, str]:
        lanes, served = self._encoders_of(media.item.kind, decoder)
        return lanes[media.is_fallback], served

    def _encoders_of(self, kind: MediaKind, decoder: str) -> tuple[tuple[EncoderLane, ...], str]:
        """Who encodes for a decoder, and the name by which they know it: a canary whose rows are no others is served as its base."""
        canary = self._canaries.get(decoder)
        if canary is None:
            return self._lanes[kind], decoder
        if kind not in canary.own_kinds:
            return self._lanes[kind], canary.base
        if (own := self._own_lanes.get((decoder, kind))) is None:
            raise EncoderUnavailable(f"the {decoder} model does not run any more", retry_after_s=None)
        return own, decoder

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


async def close_all(supervisors: Sequence[Supervisor]) -> None:
    """All at once: each may take its time to go."""
    await asyncio.gather(*(supervisor.close() for supervisor in supervisors))
