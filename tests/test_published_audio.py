"""Published models that hear, against transformers: rows for every length of clip, and greedy tokens through the whole engine."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import published_audio as published
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from test_composition import edit
from transformers import Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor

from mmserve import AsyncEngine, ChatRequest, Config, Message, SamplingParams
from mmserve.composition import BadModel, load_composition
from mmserve.config import EncoderConfig, ModelConfig, SchedulerConfig, StorageConfig
from mmserve.encoders.qwen2_audio_tower import Qwen2AudioTower
from mmserve.encoders.ultravox_tower import UltravoxTower
from mmserve.errors import BadRequest, TooLarge
from mmserve.media import MediaLimits
from mmserve.models.tower import TowerItem
from mmserve.worker.dry_load import find_problems

CPU = torch.device("cpu")
NUM_TOKENS = 64
QWEN2_AUDIO_LENGTHS_S = [0.1, 0.77, 2.0, 0.03, 1.3333]
PROMPTS = {
    "a clip as long as may be": ["what is ", published.clip(1, 2.0), " said?"],
    "three clips, one of them twice": [
        published.clip(2, 0.1), "and", published.clip(3, 1.7), "and", published.clip(2, 0.1), "differ how?",
    ],
    "words": ["tell me a story"],
}  # fmt: skip

LONG_PROMPTS = {
    "a clip of many chunks": ["what is ", published.clip(1, 6.1), " said?"],
    "a clip of a minute and more": ["what is ", published.clip(4, 61.0), " said?"],
    "a clip shorter than two frames": ["what is ", published.clip(1, 0.015), " said?"],
}


class Oracle:
    def __init__(self, directory: Path) -> None:
        self.model: Any = Qwen2AudioForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.processor: Any = Qwen2AudioProcessor.from_pretrained(directory)


@pytest.fixture(scope="module")
def qwen2_audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.build_qwen2_audio(tmp_path_factory.mktemp("published") / "qwen2-audio")


@pytest.fixture(scope="module")
def ultravox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.build_ultravox(tmp_path_factory.mktemp("published") / "ultravox")


@pytest.fixture(scope="module")
def oracle(qwen2_audio: Path) -> Oracle:
    return Oracle(qwen2_audio)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(qwen2_audio: Path, ultravox: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    config = Config(
        model=ModelConfig(small=qwen2_audio, large=ultravox, worker_threads=1),
        scheduler=SchedulerConfig(kv_cache_memory_bytes=8 * 2**20, max_num_batched_tokens=64),
        encoder=EncoderConfig(shared_buffer_bytes=64 * 2**20),
        limits=MediaLimits(max_clips=3, max_audio_s=80),
        storage=StorageConfig(data_dir=tmp_path_factory.mktemp("data")),
    )
    async with AsyncEngine(config) as engine:
        yield engine


async def answer(engine: AsyncEngine, prompt: list[str | bytes], model: str = "small") -> list[int]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, min_tokens=NUM_TOKENS)
    generation = await engine.submit(ChatRequest((Message("user", published.parts_of(prompt)),), sampling, model=model))
    return [token async for delta in generation for token in delta.token_ids]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("prompt", list(PROMPTS))
async def test_qwen2_audio_draws_the_tokens_of_transformers(engine: AsyncEngine, oracle: Oracle, prompt: str) -> None:
    theirs = published.greedy(oracle.model, oracle.processor, PROMPTS[prompt], NUM_TOKENS)
    assert await answer(engine, PROMPTS[prompt]) == theirs


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("prompt", [*PROMPTS, *LONG_PROMPTS])
async def test_ultravox_draws_the_tokens_of_its_description(engine: AsyncEngine, ultravox: Path, prompt: str) -> None:
    parts = (PROMPTS | LONG_PROMPTS)[prompt]
    assert await answer(engine, parts, "large") == published.Ultravox(ultravox).greedy(parts, NUM_TOKENS)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seconds", [2.01, 61.0])
async def test_a_clip_longer_than_the_model_hears_is_refused_and_not_cut(engine: AsyncEngine, seconds: float) -> None:
    with pytest.raises(TooLarge, match="clips of at most 2 s"):
        await answer(engine, ["what?", published.clip(1, seconds)])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_clip_of_less_than_two_frames_gives_no_rows_and_is_refused(engine: AsyncEngine) -> None:
    with pytest.raises(BadRequest, match="too short") as caught:
        await answer(engine, ["what?", published.clip(1, 0.02)])
    assert caught.value.code == "audio_too_short"


def test_a_batch_of_unlike_clips_gives_the_rows_of_transformers(qwen2_audio: Path, oracle: Oracle) -> None:
    """Transformers splices its rows into the prompt: they are read where its decoder meets them."""
    clips = [published.clip(seed, seconds) for seed, seconds in enumerate(QWEN2_AUDIO_LENGTHS_S)]
    inputs = published.inputs_of(oracle.processor, ["listen: ", *clips])
    theirs = published.media_rows(oracle.model, inputs, oracle.model.config.audio_token_id)
    spec = load_composition(qwen2_audio).audio_of("small")
    tower = Qwen2AudioTower(spec, CPU, torch.float32)
    items = [TowerItem(torch.from_numpy(each), spec.num_rows(len(each))) for each in map(published.samples, clips)]
    torch.testing.assert_close(torch.cat(tower.encode(items, "small")), theirs, rtol=1e-4, atol=1e-5)


def test_a_tower_counts_what_it_was_promised(qwen2_audio: Path) -> None:
    spec = load_composition(qwen2_audio).audio_of("small")
    tower = Qwen2AudioTower(spec, CPU, torch.float32)
    with pytest.raises(ValueError, match="for \\[24\\] rows reserved"):
        tower.encode([TowerItem(torch.zeros(16_000), 24)], "small")
    assert len(tower.encode([tower.blank()], "small")[0]) == 50


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"audio_config": {"model_type": "wav2vec2"}}, "model_type must be 'qwen2_audio_encoder', got 'wav2vec2'"),
        ("preprocessor_config.json", {"hop_length": 80}, "hop_length must be 160, got 80"),
        ("preprocessor_config.json", {"feature_size": 128}, "feature_size must be 80, got 128"),
        ("preprocessor_config.json", {"padding_side": "left"}, "padding_side must be 'right', got 'left'"),
        ("preprocessor_config.json", {"chunk_length": 30}, "clips come out 30 s long, the tower takes 2 s"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    qwen2_audio: Path, tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    copy = shutil.copytree(qwen2_audio, tmp_path / "copy")
    published.split_processor(copy)
    edit(copy / file, **change)
    with pytest.raises(BadModel, match=message):
        load_composition(copy)


@pytest.mark.parametrize("norm_is_mid", [True, False])
def test_a_batch_of_unlike_clips_gives_the_rows_that_each_gives_alone(tmp_path: Path, norm_is_mid: bool) -> None:
    """The reference computes every chunk by itself, unpadded; ours pads them to the longest and masks."""
    directory = published.build_ultravox(tmp_path / "ultravox", norm_is_mid=norm_is_mid)
    clips = [published.clip(seed, seconds) for seed, seconds in enumerate([0.1, 2.0, 6.1, 0.33, 0.001, 4.0])]
    spec = load_composition(directory).audio_of("small")
    tower = UltravoxTower(spec, CPU, torch.float32)
    items = [TowerItem(torch.from_numpy(each), spec.num_rows(len(each))) for each in map(published.samples, clips)]
    oracle = published.Ultravox(directory)
    for ours, data in zip(tower.encode(items, "small"), clips, strict=True):
        torch.testing.assert_close(ours, oracle.rows(data), rtol=1e-4, atol=1e-5)


def test_a_tower_and_a_decoder_that_were_trained_further_go_before_the_named_ones(ultravox: Path, tmp_path: Path) -> None:
    shutil.copytree(ultravox.parent, tmp_path / "models")
    directory = tmp_path / "models" / "ultravox"
    whisper, llama = directory.parent / "org" / "whisper", directory.parent / "llama"
    encoder = {name.replace("encoder.", "audio_tower.", 1): tensor for name, tensor in load_file(whisper / "model.safetensors").items()}
    own = {name: tensor for name, tensor in encoder.items() if name.startswith("audio_tower.")}
    own |= {f"language_model.{name}": tensor for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(own | load_file(directory / "model.safetensors"), directory / "model.safetensors")
    composition = load_composition(directory)
    assert find_problems(composition) == ()
    assert composition.audio_of("small").weights.path == composition.decoders["small"].weights.path == directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_model_id": "org/mistral"}, "text_model_id is 'org/mistral', which is neither .*/org/mistral nor .*/mistral"),
        ({"audio_model_id": None}, "config.json has no audio_model_id"),
        ({"projector_act": "gelu"}, "projector_act must be 'swiglu', got 'gelu'"),
        ({"audio_latency_block_size": 100}, "audio_latency_block_size must be None, got 100"),
    ],
)
def test_what_of_ultravox_is_not_there_or_not_built_is_named(
    ultravox: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    copy = shutil.copytree(ultravox, tmp_path / "copy")
    for name in ("org", "llama"):
        (tmp_path / name).symlink_to(ultravox.parent / name)
    edit(copy / "config.json", **change)
    with pytest.raises(BadModel, match=message):
        load_composition(copy)


def test_a_tensor_that_ultravox_does_not_have_is_named(ultravox: Path, tmp_path: Path) -> None:
    shutil.copytree(ultravox.parent, tmp_path / "models")
    file = tmp_path / "models" / "ultravox" / "model.safetensors"
    save_file({"lora.weight": torch.zeros(1)} | load_file(file), file)
    with pytest.raises(BadModel, match=r"unknown lora\.weight"):
        load_composition(file.parent)
