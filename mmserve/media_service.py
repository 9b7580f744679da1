"""Everything a request's media meet on their way to rows: header, digest, decode process, encoder worker, embedding cache.

The scheduler knows none of it; the engine knows only `prepare`, `room` and `fetch`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from mmserve.composition import Composition
from mmserve.config import Config, worker_module
from mmserve.encoders.decode_process import DecodeProcesses
from mmserve.encoders.disk_tier import DiskTier
from mmserve.encoders.embedding_cache import CacheEvent, EmbeddingCache
from mmserve.encoders.encoder_pool import EncoderPool
from mmserve.encoders.image_header import read_header
from mmserve.errors import BadRequest, TooLarge, WorkerDied
from mmserve.hit_watch import HitWatch
from mmserve.media import AudioHeader, ImageHeader, MediaItem, MediaKind, MediaWindow, PreparedMedia, content_digest
from mmserve.metrics import Metrics
from mmserve.plan import EncodePlan, EncodeResult, EncoderReady, EncoderWorkerSpec
from mmserve.shared_buffer import ITEM_SIZE, SharedBuffer
from mmserve.supervisor import Supervisor, Worker, alone

log = logging.getLogger(__name__)

ENCODE_TIMEOUT_S = 120.0  # a full batch of 48 pictures on a busy laptop
SMALL_BYTES = 64 * 1024  # hashed on the loop: well under a millisecond
MAX_CLIP_HEADERS = 4096  # clips whose length is remembered
SHARE_FOR_REQUESTS = 0.8  # of the shared buffer; the rest lets rows of the past stay while new ones land


class SupervisedEncoder:
    """What an encoder pool calls: the current life of one encoder worker, waited for while there is none."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._ready = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self._worker is not None

    async def serve(self, worker: Worker, ready: EncoderReady) -> None:
        self._worker = worker
        self._ready.set()
        try:
            await worker.died.wait()
        finally:
            self._worker = None
            self._ready.clear()
        raise WorkerDied("encoder ended")

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def encode(self, plan: EncodePlan) -> EncodeResult:
        """Raises WorkerDied."""
        await self._ready.wait()
        if self._worker is None:
            raise WorkerDied("encoder ended")
        result = await self._worker.call(plan, ENCODE_TIMEOUT_S)
        assert isinstance(result, EncodeResult), f"unexpected reply {type(result).__name__}"
        return result


class MediaRoom:
    """Bytes of the shared buffer promised to requests, first come, first served.

    A request takes all it may need before its first encode or waits with nothing, so no two can each hold what the other lacks.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = num_bytes
        self._queue: list[tuple[int, asyncio.Future[None]]] = []

    async def take(self, num_bytes: int) -> None:
        if not self._queue and num_bytes <= self._free:
            self._free -= num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(num_bytes)
            else:
                self._queue.remove((num_bytes, turn))
                self._serve_queue()
            raise

    def give_back(self, num_bytes: int) -> None:
        self._free += num_bytes
        assert self._free <= self.num_bytes, "media room given back twice"
        self._serve_queue()

    def _serve_queue(self) -> None:
        while self._queue and self._queue[0][0] <= self._free:
            num_bytes, turn = self._queue.pop(0)
            self._free -= num_bytes
            turn.set_result(None)


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
        self.room = MediaRoom(int(buffer.memory.num_bytes * SHARE_FOR_REQUESTS))
        self.supervisors: list[Supervisor] = []
        self._watch = HitWatch(num_inherited=0)
        self._clip_headers: dict[bytes, AudioHeader] = {}  # by content, oldest first
        self._clients: dict[MediaKind, list[SupervisedEncoder]] = {}

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
            self.pools: dict[MediaKind, EncoderPool] = {}
            for kind in MediaKind:
                specs = self._composition.encoders(kind)
                if not specs:
                    continue
                clients = []
                for i, device in enumerate(devices[kind]):
                    worker_spec = EncoderWorkerSpec(kind, specs, device, self._rows_dtype, num_threads, max_batch)
                    client = SupervisedEncoder()
                    role = f"{kind.value}-encoder-{i}"
                    self.supervisors.append(
                        Supervisor(
                            role,
                            f"{worker_module(device)}:run_encoder",
                            alone(worker_spec, buffer.memory),
                            client.serve,
                            on_restart=self._on_restart,
                        )
                    )
                    stack.push_async_callback(self.supervisors[-1].close)
                    clients.append(client)
                for decoder, spec in specs.items():  # while the workers load: hashing a large tower takes seconds
                    await asyncio.to_thread(spec.version, decoder)
                self._clients[kind] = clients
                pool = self._make_pool(kind, clients, max_batch)
                stack.push_async_callback(pool.close)
                self.pools[kind] = pool
            yield

    def alive(self, kind: MediaKind) -> bool:
        return any(client.alive for client in self._clients[kind])

    async def prepare(self, item: MediaItem, decoder: str, salt: bytes) -> PreparedMedia:
        """Digest, header, counts; nothing is decoded.  Raises the error of whatever limit the item breaks."""
        media = await self._prepare(item, decoder, salt)
        now_s = time.monotonic()
        for window in media.windows:
            self._flag(self._watch.asked(window.key, media.content, now_s), now_s)
        return media

    async def _prepare(self, item: MediaItem, decoder: str, salt: bytes) -> PreparedMedia:
        content = content_digest(item.data) if len(item.data) <= SMALL_BYTES else await asyncio.to_thread(content_digest, item.data)
        if item.kind is MediaKind.IMAGE:
            vision = self._composition.vision_of(decoder, item.param)
            header = read_header(item.data, self._config.limits, item.param)
            return PreparedMedia(item, content, header, vision.windows(content, decoder, header, detail=item.detail, salt=salt))
        audio = self._composition.audio_of(decoder, item.param)
        clip = self._clip_headers.get(content)
        if clip is None:
            clip = await self.decode.probe_audio(item)  # decodes all of it, to count
            if len(self._clip_headers) >= MAX_CLIP_HEADERS:
                del self._clip_headers[next(iter(self._clip_headers))]
            self._clip_headers[content] = clip
        num_samples = audio.num_samples(clip.num_frames, clip.sample_rate)
        return PreparedMedia(item, content, clip, audio.windows(content, decoder, num_samples, salt=salt, param=item.param), num_samples)

    def check_pixels(self, media: tuple[PreparedMedia, ...]) -> None:
        """Raises TooLarge when the pictures are too much together."""
        pixels = sum(item.header.width * item.header.height for item in media if isinstance(item.header, ImageHeader))
        limit = self._config.limits.max_request_pixels
        if pixels > limit:
            raise TooLarge(f"pictures of one request may have {limit} pixels together, got {pixels}", param="messages")

    def num_bytes(self, media: tuple[PreparedMedia, ...], decoder: str) -> int:
        """Shared memory a request may need: features and rows of every window.  Raises TooLarge when it never fits."""
        row_bytes = self._composition.decoders[decoder].hidden_size * ITEM_SIZE[self._rows_dtype]
        total = sum(item.num_rows * row_bytes + self._feature_bytes(item, decoder) for item in media)
        if total > self.room.num_bytes:
            raise TooLarge(f"media of one request may take {self.room.num_bytes} bytes of memory, these take {total}", param="messages")
        return total

    def _feature_bytes(self, item: PreparedMedia, decoder: str) -> int:
        if item.picture_size is None:
            return 4 * item.num_samples
        return math.prod(self._composition.vision_of(decoder).fit.feature_shape(*item.picture_size))

    def acquire(self, window: MediaWindow) -> bool:
        """Pin rows that are in memory already for the caller."""
        return self.pools[window.kind].acquire(window)

    async def fetch(self, media: PreparedMedia, window: MediaWindow, decoder: str) -> str:
        """Rows of the window are in the cache and pinned for the caller.  Returns where they came from."""
        pool = self.pools.get(window.kind)
        if pool is None:
            raise BadRequest(f"this model takes no {window.kind.value}", param=media.item.param)
        return await pool.fetch(media, window, decoder)

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

    def _make_pool(self, kind: MediaKind, clients: list[SupervisedEncoder], max_batch: int) -> EncoderPool:
        return EncoderPool(
            kind,
            clients,
            self.decode,
            self.cache,
            self._buffer,
            self._metrics,
            composition=self._composition,
            rows_dtype=self._rows_dtype,
            window_s=self._config.encoder.micro_batch_window_ms / 1e3,
            max_batch=max_batch,
        )
