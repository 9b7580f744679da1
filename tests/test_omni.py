"""Qwen2.5-Omni's thinker against transformers: rows of both towers, and greedy tokens of anything interleaved through the whole engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import published_audio as published
import pytest
import pytest_asyncio
import torch
from published_models import picture
from safetensors.torch import load_file, save_file
from test_composition import edit
from transformers import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mmserve import AsyncEngine, ChatRequest, Config, Message, SamplingParams
from mmserve.composition import BadModel, load_composition
from mmserve.composition.picture_fit import SmartResize
from mmserve.config import EncoderConfig, ModelConfig, SchedulerConfig, StorageConfig
from mmserve.encoders import image
from mmserve.encoders.qwen2_5_omni_towers import OmniAudioTower, OmniVisionTower
from mmserve.errors import TooLarge
from mmserve.media import MediaLimits
from mmserve.models.tower import TowerItem
from mmserve.worker.dry_load import find_problems

CPU = torch.device("cpu")
NUM_TOKENS = 64
SIZES = [(300, 40), (57, 56), (100, 190), (20, 20), (1000, 700)]  # width, height
LENGTHS_S = [0.1, 0.77777, 2.0, 0.0301, 61.0]
PROMPTS = {
    "a wide picture": ["what is in ", picture(1, 300, 40), "?"],
    "pictures and clips by turns": [
        picture(2, 90, 200), "and", published.clip(2, 1.3), "and", picture(3, 200, 90), picture(3, 200, 90), published.clip(3, 0.1), "?",
    ],
    "a long clip before a picture": [published.clip(4, 61), "shown in ", picture(4, 120, 120)],
    "a long clip": ["well: ", published.clip(5, 58.7), "what was that?"],
    "words": ["tell me a story"],
}  # fmt: skip


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.build_omni(tmp_path_factory.mktemp("published") / "omni")


@pytest.fixture(scope="module")
def model(omni: Path) -> Any:
    return Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(omni, dtype=torch.float32).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(omni: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    """Its KV cache holds one sequence of the longest context, and not two of the long prompts with their answers."""
    config = Config(
        model=ModelConfig(small=omni, worker_threads=1),
        scheduler=SchedulerConfig(kv_cache_memory_bytes=2_200_000, max_num_batched_tokens=64),
        encoder=EncoderConfig(shared_buffer_bytes=64 * 2**20),
        limits=MediaLimits(max_clips=3, max_audio_s=80),
        storage=StorageConfig(data_dir=tmp_path_factory.mktemp("data")),
    )
    async with AsyncEngine(config) as engine:
        yield engine


async def answer(engine: AsyncEngine, prompt: list[str | bytes]) -> list[int]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, min_tokens=NUM_TOKENS)
    generation = await engine.submit(ChatRequest((Message("user", published.parts_of(prompt)),), sampling))
    return [token async for delta in generation for token in delta.token_ids]


@pytest.mark.asyncio(loop_scope="module")
async def test_all_at_once_draw_the_tokens_of_transformers_and_so_does_what_is_cached(engine: AsyncEngine, omni: Path, model: Any) -> None:
    """Prompts are chunked by 64 tokens and crowd each other out of the cache; the second time some of their blocks are still there."""
    processor = published.OmniProcessor(omni)
    theirs = [published.greedy(model, processor, prompt, NUM_TOKENS) for prompt in PROMPTS.values()]
    assert await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS.values())) == theirs
    for prompt, expected in zip(PROMPTS.values(), theirs, strict=True):
        assert await answer(engine, prompt) == expected
        assert await answer(engine, prompt) == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_a_clip_longer_than_the_model_hears_is_refused(engine: AsyncEngine) -> None:
    with pytest.raises(TooLarge, match="clips of at most 70 s"):
        await answer(engine, ["what?", published.clip(1, 70.01)])


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_towers_give_the_rows_of_transformers(omni: Path, model: Any, tmp_path: Path, padding_side: str) -> None:
    copy = shutil.copytree(omni, tmp_path / "copy")
    extractor = json.loads((copy / "processor_config.json").read_text())["feature_extractor"]
    edit(copy / "processor_config.json", feature_extractor=extractor | {"padding_side": padding_side})
    clips = [published.clip(seed, seconds) for seed, seconds in enumerate(LENGTHS_S)]
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    inputs = published.inputs_of(published.OmniProcessor(omni, padding_side), ["look: ", *clips, *pictures])
    composition = load_composition(copy)
    audio, vision = composition.audio_of("small"), composition.vision_of("small")
    heard = [TowerItem(torch.from_numpy(each), audio.num_rows(len(each))) for each in map(published.samples, clips)]
    seen = [
        TowerItem(torch.from_numpy(image.decode(data, vision.fit).copy()), vision.fit.num_rows(*size), size)
        for data, size in zip(pictures, SIZES, strict=True)
    ]
    for tower, items, token in (
        (OmniAudioTower(audio, CPU, torch.float32), heard, model.config.audio_token_id),
        (OmniVisionTower(vision, CPU, torch.float32), seen, model.config.image_token_id),
    ):
        theirs = published.media_rows(model, inputs, token)
        torch.testing.assert_close(torch.cat(tower.encode(items, "small")), theirs, rtol=1e-4, atol=1e-5)


def test_a_picture_that_is_not_as_it_was_counted_is_no_picture(omni: Path) -> None:
    tower = OmniVisionTower(load_composition(omni).vision_of("small"), CPU, torch.float32)
    with pytest.raises(ValueError, match=r"pictures of \[4\] rows for \[5\] reserved"):
        tower.encode([TowerItem(torch.zeros(1, 56, 56, 3, dtype=torch.uint8), 5, (56, 56))], "small")
    assert len(tower.encode([tower.blank()], "small")[0]) == 4


@pytest.mark.parametrize("bounds", [(56 * 56, 28 * 28 * 1280), (28 * 28 * 100, 28 * 28 * 101)])
def test_pictures_have_the_sizes_of_transformers(bounds: tuple[int, int]) -> None:
    fit = SmartResize(28, *bounds)
    for width, height in [(1, 1), (7, 300), (14, 42), (641, 479), (3000, 17), (999, 4001), (70, 70), (28, 5600)]:
        down, across = smart_resize(height, width, 28, *bounds)
        assert fit.resized(width, height) == (across, down)
        assert fit.num_rows(width, height) == (down // 28) * (across // 28)


def test_the_whole_model_is_read_for_its_thinker(omni: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(omni, tmp_path / "copy")
    thinker = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": thinker, "talker_config": {}}))
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tensors | {"talker.codec_head.weight": torch.zeros(1)}, copy / "model.safetensors")
    composition = load_composition(copy)
    assert find_problems(composition) == ()
    assert composition.modalities == ("text", "image", "audio")
    save_file(tensors | {"singer.weight": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(BadModel, match=r"unknown singer\.weight"):
        load_composition(copy)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("image_processor", {"patch_size": 16}, "patch_size must be 14, got 16"),
        ("image_processor", {"merge_size": 1}, "merge_size must be 2, got 1"),
        ("image_processor", {"do_resize": False}, "do_resize must be True, got False"),
        ("feature_extractor", {"feature_size": 128}, "feature_size must be 80, got 128"),
    ],
)
def test_what_is_not_built_is_refused_by_name(omni: Path, tmp_path: Path, part: str, change: dict[str, object], message: str) -> None:
    copy = shutil.copytree(omni, tmp_path / "copy")
    values = json.loads((copy / "processor_config.json").read_text())
    edit(copy / "processor_config.json", **{part: values[part] | change})
    with pytest.raises(BadModel, match=message):
        load_composition(copy)
