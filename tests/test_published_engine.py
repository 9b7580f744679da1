"""Published directories through the whole engine: the greedy tokens of transformers, from processor to answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import published_models as published
import pytest
import pytest_asyncio
from transformers import LlavaForConditionalGeneration, LlavaNextForConditionalGeneration, LlavaNextProcessor, LlavaProcessor

from mmserve import AsyncEngine, ChatRequest, Config, Message, SamplingParams
from mmserve.config import EncoderConfig, ModelConfig, SchedulerConfig, StorageConfig
from mmserve.media import MediaItem, MediaKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 64
ORACLES = {
    "small": (LlavaForConditionalGeneration, LlavaProcessor),
    "large": (LlavaNextForConditionalGeneration, LlavaNextProcessor),
}
PROMPTS = {
    "one wide picture": ["what is in ", published.picture(1, 300, 40), "?"],
    "three pictures, one of them twice": [
        published.picture(2, 40, 190), "and", published.picture(3, 57, 56), "and", published.picture(2, 40, 190), "differ how?",
    ],
    "words": ["tell me a story"],
}  # fmt: skip


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {"small": published.build_llava(root / "llava"), "large": published.build_llava_next(root / "next", seed=1)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    config = Config(
        model=ModelConfig(small=directories["small"], large=directories["large"], worker_threads=1),
        scheduler=SchedulerConfig(kv_cache_memory_bytes=8 * 2**20, max_num_batched_tokens=64),
        encoder=EncoderConfig(shared_buffer_bytes=64 * 2**20),
        storage=StorageConfig(data_dir=tmp_path_factory.mktemp("data")),
    )
    async with AsyncEngine(config) as engine:
        yield engine


@pytest.mark.parametrize("prompt", list(PROMPTS))
@pytest.mark.parametrize("name", list(ORACLES))
async def test_greedy_tokens_are_those_of_transformers(engine: AsyncEngine, directories: dict[str, Path], name: str, prompt: str) -> None:
    """The two decoders have towers, fits and rows of their own, behind one encoder worker."""
    parts = tuple(MediaItem(MediaKind.IMAGE, part) if isinstance(part, bytes) else part for part in PROMPTS[prompt])
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, min_tokens=NUM_TOKENS)
    generation = await engine.submit(ChatRequest((Message("user", parts),), sampling, model=name))
    ours = [token async for delta in generation for token in delta.token_ids]
    assert ours == published.greedy(directories[name], *ORACLES[name], PROMPTS[prompt], NUM_TOKENS)


async def test_both_models_take_pictures(engine: AsyncEngine) -> None:
    assert engine.composition.modalities_of("large") == ("text", "image")
    assert engine.ready("image")
