"""What tests of failing encoders share: the real engine over real processes, with encoder workers that do as they are told."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import naughty_encoder
import numpy as np
import pytest
import tiny_model
import torch
from PIL import Image

from mmserve import AsyncEngine, ChatRequest, Config, Message, SamplingParams
from mmserve.config import EncoderConfig, ModelConfig, SchedulerConfig, StorageConfig
from mmserve.encoder_lanes import EncoderLane
from mmserve.media import MediaItem, MediaKind
from mmserve.token_stream import Generation

IMAGE = MediaKind.IMAGE


def picture(seed: int) -> MediaItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), np.uint8)
    return _item(Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST), f"picture-{seed}")


def grey(value: int, note: int = 0) -> MediaItem:
    """One colour; with another `note` other bytes, of another size."""
    return _item(Image.new("RGB", (64, 64 + note), (value, value, value)), f"grey-{value}-{note}")


def _item(image: Image.Image, param: str) -> MediaItem:
    file = io.BytesIO()
    image.save(file, "PNG")
    return MediaItem(MediaKind.IMAGE, file.getvalue(), param=param)


def ask(*parts: str | MediaItem, max_tokens: int = 8, allow_degraded: bool = False, model: str = "small") -> ChatRequest:
    """Seeded: the same rows give the same tokens, and others don't."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=11, ignore_eos=True)
    return ChatRequest((Message("user", parts),), sampling, model=model, allow_degraded=allow_degraded)


async def read(generation: Generation) -> tuple[int, ...]:
    return tuple([token_id async for delta in generation for token_id in delta.token_ids])


async def tokens(engine: AsyncEngine, request: ChatRequest) -> tuple[int, ...]:
    return await read(await engine.submit(request))


def build_model(directory: Path, *, fallback: bool = False) -> Path:
    """The random model, if wanted with another tower of the same format to fall back to, for the small decoder only."""
    tiny_model.build(directory)
    if fallback:
        with torch.random.fork_rng():
            torch.manual_seed(99)
            tiny_model.build_vision(directory / "vision-fallback")
            hidden = tiny_model.SHAPES["small"]["hidden_size"]
            tiny_model.build_projector(directory / "projectors" / "fallback.safetensors", tiny_model.ENCODER_HIDDEN, hidden)
        table = '[vision.fallback]\nencoder = "vision-fallback"\nprojectors = { small = "projectors/fallback.safetensors" }\n\n'
        file = directory / "composition.toml"
        file.write_text(re.sub(r"(?m)^\[audio\]", lambda _: table + "[audio]", file.read_text()))
    return directory


def config(model: Path, data: Path, **encoder: object) -> Config:
    fields = {"shared_buffer_bytes": 64 * 2**20, "max_encoder_batch": 48} | encoder
    return Config(
        model=ModelConfig(model=model, worker_threads=1),
        scheduler=SchedulerConfig(kv_cache_memory_bytes=32 * 2**20),
        encoder=EncoderConfig(**fields),  # type: ignore[arg-type]
        storage=StorageConfig(data_dir=data),
    )


class Naughty:
    """What encoder workers are told to do."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def tell(self, verb: str, tower: str = "vision") -> None:
        (self._directory / f"{tower}.{verb}").touch()

    def stop(self, verb: str, tower: str = "vision") -> None:
        (self._directory / f"{tower}.{verb}").unlink()


@asynccontextmanager
async def naughty_engine(config: Config, directory: Path) -> AsyncIterator[tuple[AsyncEngine, Naughty]]:
    """An engine whose encoder workers are naughty.  At the end nobody holds anything."""
    with pytest.MonkeyPatch.context() as patch:
        os.makedirs(directory, exist_ok=True)
        patch.setenv(naughty_encoder.DIRECTORY, str(directory))
        patch.setattr("mmserve.encoder_lanes.worker_module", lambda device: "naughty_encoder")
        async with AsyncEngine(config) as engine:
            yield engine, Naughty(directory)
            await settled(engine)


def lane(engine: AsyncEngine, index: int = 0) -> EncoderLane:
    return engine._media._lanes[IMAGE][index]


def encoder_pid(engine: AsyncEngine) -> int:
    pid = lane(engine).supervisors[0].pid
    assert pid is not None
    return pid


def breaker_state(engine: AsyncEngine, name: str = "image") -> float | None:
    return engine.metrics.registry.get_sample_value("mmserve:breaker_state", {"modality": name})


async def until(condition: object, timeout_s: float = 60.0) -> None:
    """Of state that other processes change."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def counter(engine: AsyncEngine, name: str) -> float:
    samples = [sample for metric in engine.metrics.registry.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name == f"mmserve:{name}")


async def settled(engine: AsyncEngine) -> None:
    """Nothing is held by anybody, or soon not any more."""
    await engine._media.cache.flush()
    replicas = [replica for group in engine._groups.values() for replica in group._replicas]
    await until(lambda: not engine._media.cache.num_pinned and not any(each.kv.usage or each.scheduler.num_in_flight for each in replicas))
    assert not engine._active
    assert not engine._fetches
    assert engine._media.room._free == engine._media.room.num_bytes
    engine._media.cache.check()
    assert len(engine._media.cache.buffer._held) == len(engine._media.cache)
