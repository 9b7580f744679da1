"""The encoders of one kind of media, in the order in which they are asked: the model's own, in workers here or hosted, and its fallback.

Each has its own processes and its own circuit breaker, so that the fallback stands when the first one falls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from mmserve.composition import Composition
from mmserve.composition.prepare import prepare_media
from mmserve.config import ConfigError, EncoderConfig, worker_module
from mmserve.encoders.decode_process import DecodeProcesses
from mmserve.encoders.embedding_cache import EmbeddingCache
from mmserve.encoders.encode_order import Encoder
from mmserve.encoders.encoder_pool import EncoderPool
from mmserve.encoders.hosted_encoder import HostedConfig, HostedEncoder
from mmserve.encoders.local_encoder import LocalEncoder
from mmserve.media import AudioHeader, ImageHeader, MediaItem, MediaKind, PreparedMedia, content_digest
from mmserve.metrics import Metrics
from mmserve.plan import EncoderWorkerSpec
from mmserve.readiness import BLANK_FRAMES, BLANK_RATE, BLANK_SIDE, blank_clip, blank_picture
from mmserve.shared_buffer import SharedBuffer
from mmserve.supervised_encoder import SupervisedEncoder
from mmserve.supervisor import Supervisor, alone


@dataclass(eq=False)
class EncoderLane:
    """One encoder and those who run it: nobody here if it is hosted."""

    pool: EncoderPool
    supervisors: list[Supervisor] = field(default_factory=list)
    clients: list[SupervisedEncoder] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return self.pool.health.is_closed and (not self.clients or any(client.alive for client in self.clients))


@dataclass(frozen=True)
class EncoderLanes:
    """Opens lanes.  Holds what all of them share."""

    config: EncoderConfig
    decode: DecodeProcesses
    cache: EmbeddingCache
    buffer: SharedBuffer
    metrics: Metrics
    rows_dtype: str
    num_threads: int
    max_batch: int
    on_restart: Callable[[str], None]
    on_lost: Callable[[bytes], None]
    supervisors: list[Supervisor]  # of all workers, for the owner to close when the pools are closed

    async def open(
        self, kind: MediaKind, composition: Composition, devices: tuple[str, ...], stack: AsyncExitStack
    ) -> tuple[EncoderLane, ...]:
        """All of this kind, their pools closed by `stack`.  Workers may still be loading.  Raises ConfigError."""
        hosted = hosted_config(self.config, kind)
        if hosted is None:
            lanes = [await self.open_local(kind.value, kind, composition, devices, stack)]
        else:
            lanes = [await self._open_hosted(kind, composition.hosted(kind, hosted.version), hosted, stack)]
        if (fallback := composition.fallback(kind)) is not None:
            lanes.append(await self.open_local(f"{kind.value}-fallback", kind, fallback, devices, stack))
        return tuple(lanes)

    async def open_local(
        self, name: str, kind: MediaKind, composition: Composition, devices: tuple[str, ...], stack: AsyncExitStack
    ) -> EncoderLane:
        """One encoder of a kind, in workers of ours; `name` tells it from the others."""
        specs = composition.encoders(kind)
        clients = [SupervisedEncoder() for _ in devices]
        encoder = LocalEncoder(
            kind,
            clients,
            self.decode,
            self.cache,
            self.metrics,
            composition=composition,
            rows_dtype=self.rows_dtype,
            window_s=self.config.micro_batch_window_ms / 1e3,
            max_batch=self.max_batch,
        )
        lane = EncoderLane(self._pool(name, kind, encoder, composition), clients=clients)

        def note_restart(role: str) -> None:
            self.on_restart(role)
            if all(supervisor.broken for supervisor in lane.supervisors):
                lane.pool.health.trip("crash_loop")

        for i, (client, device) in enumerate(zip(clients, devices, strict=True)):
            spec = EncoderWorkerSpec(kind, specs, device, self.rows_dtype, self.num_threads, self.max_batch)
            target = f"{worker_module(device)}:run_encoder"
            supervisor = Supervisor(f"{name}-encoder-{i}", target, alone(spec, self.buffer.memory), client.serve, on_restart=note_restart)
            lane.supervisors.append(supervisor)
            self.supervisors.append(supervisor)
        stack.push_async_callback(lane.pool.close)
        for decoder, each in specs.items():  # while the workers load: hashing a large tower takes seconds
            await asyncio.to_thread(each.version, decoder)
        return lane

    async def _open_hosted(self, kind: MediaKind, composition: Composition, hosted: HostedConfig, stack: AsyncExitStack) -> EncoderLane:
        decoder = next(iter(composition.encoders(kind)))
        encoder = HostedEncoder(kind, hosted, _blank(kind, composition, decoder), decoder, self.buffer, composition)
        pool = self._pool(kind.value, kind, encoder, composition)
        stack.push_async_callback(pool.close)
        await pool.health.prove()  # a service that is down is no reason not to start: text works, and it may come back
        return EncoderLane(pool)

    def _pool(self, name: str, kind: MediaKind, encoder: Encoder, composition: Composition) -> EncoderPool:
        return EncoderPool(
            kind,
            encoder,
            self.cache,
            self.metrics,
            composition=composition,
            rows_dtype=self.rows_dtype,
            name=name,
            on_lost=self.on_lost,
        )


def hosted_config(config: EncoderConfig, kind: MediaKind) -> HostedConfig | None:
    """Where this kind is encoded elsewhere; None if it is encoded here.  Raises ConfigError."""
    noun, url, version = {
        MediaKind.IMAGE: ("vision", config.vision_url, config.vision_version),
        MediaKind.AUDIO: ("audio", config.audio_url, config.audio_version),
    }[kind]
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{noun}-url must begin with http:// or https://", param=f"{noun}-url")
    if not version or not version.isascii() or not version.isprintable() or version != version.strip():
        raise ConfigError(f"{noun}-url needs {noun}-version, in printable ASCII: rows are kept under it", param=f"{noun}-version")
    if config.hosted_encoder_concurrency < 1 or config.hosted_encoder_timeout_s <= 0:
        raise ConfigError("a hosted encoder needs some time, and at least one item at once", param=f"{noun}-url")
    return HostedConfig(
        url, version, config.hosted_encoder_key, config.hosted_encoder_timeout_s, max_concurrency=config.hosted_encoder_concurrency
    )


def _blank(kind: MediaKind, composition: Composition, decoder: str) -> PreparedMedia:
    """What probes of a hosted encoder send."""
    header: ImageHeader | AudioHeader
    if kind is MediaKind.IMAGE:
        data, header = blank_picture(), ImageHeader("png", BLANK_SIDE, BLANK_SIDE)
    else:
        data, header = blank_clip(), AudioHeader("wav", BLANK_RATE, 1, BLANK_FRAMES)
    return prepare_media(MediaItem(kind, data), content_digest(data), header, composition, decoder)
