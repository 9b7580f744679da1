"""Small random models that hear, in published formats, and what transformers makes of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import published_models as published
import soundfile
import torch
from PIL import Image
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)

from mmserve.media import MediaItem, MediaKind

SAMPLE_RATE = 16_000  # Hz
LONGEST_S = 2  # of a clip that the small Qwen2-Audio hears

QWEN2 = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 448, "max_position_embeddings": 4096, "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_ENCODER = {
    "num_mel_bins": 80, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32, "initializer_range": 0.1,
}  # fmt: skip
_QWEN2_AUDIO_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def clip(seed: int, seconds: float) -> bytes:
    """A WAV of a few gliding tones: each stretch of it sounds different."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = [np.sin(2 * np.pi * (start * time + glide * time**2)) for start, glide in random.uniform((80, 20), (3000, 400), (4, 2))]
    file = io.BytesIO()
    soundfile.write(file, (np.sum(tones, axis=0) * 6000).astype(np.int16), SAMPLE_RATE, format="WAV")
    return file.getvalue()


def samples(data: bytes) -> np.ndarray:
    """float32 [n]"""
    return soundfile.read(io.BytesIO(data), dtype="float32")[0]


def build_qwen2_audio(directory: Path, seed: int = 0) -> Path:
    tokenizer = published.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(**_ENCODER, max_source_positions=50 * LONGEST_S),
        text_config=Qwen2Config(**QWEN2),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    published.save(directory, seed, lambda: Qwen2AudioForConditionalGeneration(config))
    extractor = WhisperFeatureExtractor(feature_size=80, chunk_length=LONGEST_S)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=_QWEN2_AUDIO_TEMPLATE).save_pretrained(directory)
    return directory


def split_processor(directory: Path) -> None:
    """As transformers 4 wrote it: the feature extractor's settings in a file of their own."""
    file = directory / "processor_config.json"
    values = json.loads(file.read_text())
    (directory / "preprocessor_config.json").write_text(json.dumps(values.pop("feature_extractor")))
    file.write_text(json.dumps(values))


def kind_of(part: bytes) -> MediaKind:
    return MediaKind.AUDIO if part.startswith(b"RIFF") else MediaKind.IMAGE


def parts_of(prompt: Sequence[str | bytes]) -> tuple[str | MediaItem, ...]:
    return tuple(MediaItem(kind_of(part), part) if isinstance(part, bytes) else part for part in prompt)


def inputs_of(processor: Any, prompt: Sequence[str | bytes]) -> Any:
    """A user's message as transformers' processor prepares it."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part).value} for part in prompt]
    media = [part for part in prompt if isinstance(part, bytes)]
    heard = {"audio": [samples(part) for part in media if kind_of(part) is MediaKind.AUDIO], "sampling_rate": SAMPLE_RATE}
    seen = {"images": [Image.open(io.BytesIO(part)).convert("RGB") for part in media if kind_of(part) is MediaKind.IMAGE]}
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
    return processor(text=text, return_tensors="pt", **(heard if heard["audio"] else {}), **(seen if seen["images"] else {}))


@torch.no_grad()
def greedy(model: Any, processor: Any, prompt: Sequence[str | bytes], num_tokens: int) -> list[int]:
    """What transformers answers: processor, then `generate`."""
    inputs = inputs_of(processor, prompt)
    ids = model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in ids[0, inputs["input_ids"].shape[1] :]]


@torch.no_grad()
def media_rows(model: Any, inputs: Any, token_id: int) -> torch.Tensor:
    """[rows, H], as transformers' decoder meets them in the place of `token_id`."""
    met: dict[str, torch.Tensor] = {}
    hook = model.model.language_model.register_forward_pre_hook(lambda _, __, kwargs: met.update(kwargs), with_kwargs=True)
    model(**inputs)
    hook.remove()
    return met["inputs_embeds"][inputs["input_ids"] == token_id]
