"""A decoder held by two ranks, through the whole engine: real processes, gloo between them, real kills."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import published_models as published
import pytest

from mmserve import AsyncEngine, ChatRequest, Config, Message, SamplingParams
from mmserve.config import ConfigError, ModelConfig, SchedulerConfig, StorageConfig, replica_devices

NUM_TOKENS = 60
PROMPTS = ("tell me a story", "what is in the picture?", "count to ten", "hello")


@asynccontextmanager
async def running(model_dir: Path, data_dir: Path, num_ranks: int) -> AsyncIterator[AsyncEngine]:
    config = Config(
        model=ModelConfig(small=model_dir, tensor_parallel_size=num_ranks, worker_threads=1),
        scheduler=SchedulerConfig(kv_cache_memory_bytes=4 * 2**20, max_num_batched_tokens=64),
        storage=StorageConfig(data_dir=data_dir),
    )
    async with AsyncEngine(config) as engine:
        yield engine


async def ask(engine: AsyncEngine, prompt: str, temperature: float, under_way: asyncio.Event | None = None) -> list[int]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=temperature, seed=7, ignore_eos=True)
    token_ids: list[int] = []
    request = ChatRequest((Message("user", (prompt,)),), sampling, raw_prompt=True)
    async for delta in await engine.submit(request):
        token_ids += delta.token_ids
        if under_way is not None:
            under_way.set()
    return token_ids


async def ask_all(engine: AsyncEngine, under_way: asyncio.Event | None = None) -> list[list[int]]:
    """Greedy and sampled streams, all at once."""
    return list(await asyncio.gather(*(ask(engine, prompt, temperature, under_way) for prompt in PROMPTS for temperature in (0.0, 0.8))))


async def test_two_ranks_answer_as_one_does_and_go_on_after_one_was_killed(tmp_path: Path) -> None:
    model_dir = published.build_text(tmp_path / "model")
    async with running(model_dir, tmp_path / "one", num_ranks=1) as engine:
        expected = await ask_all(engine)
    async with running(model_dir, tmp_path / "two", num_ranks=2) as engine:
        assert await ask_all(engine) == expected

        under_way = asyncio.Event()
        streams = asyncio.create_task(ask_all(engine, under_way))
        await under_way.wait()
        (supervisor,) = engine._groups["small"].supervisors
        first, second = supervisor.pids
        os.kill(second, signal.SIGKILL)
        assert await streams == expected
        assert not {first, second} & set(supervisor.pids)


def test_devices_are_dealt_out_to_replicas() -> None:
    assert replica_devices("2-5", "cuda", 2, "large-devices") == (("cuda:2", "cuda:3"), ("cuda:4", "cuda:5"))
    assert replica_devices(None, "cuda", 2, "large-devices") == (("cuda:0", "cuda:1"),)
    assert replica_devices(None, "cpu", 1, "small-devices") == (("cpu",),)
    with pytest.raises(ConfigError, match="large-devices must name a multiple of 2 devices, as many as share a replica; got 3"):
        replica_devices("0-2", "cuda", 2, "large-devices")
