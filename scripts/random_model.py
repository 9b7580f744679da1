"""Model directories with random weights, in the shapes of published models or in small ones: our own composition, or LLaVA's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from scripts.tiny.tokenizer import CHAT_TEMPLATE, END, IMAGE, SPECIAL


@dataclass(frozen=True)
class Shapes:
    """Config fields of the three parts, and of the windows between them."""

    decoder: dict[str, Any]
    vision: dict[str, Any]
    audio: dict[str, Any]
    window_s: float


REAL = Shapes(
    decoder={
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    vision={
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336,
        "patch_size": 14, "projection_dim": 768,
    },
    audio={
        "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128,
        "max_source_positions": 1500,
    },
    window_s=30.0,
)  # fmt: skip
SMALL = Shapes(
    decoder={
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    },
    vision={
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        "projection_dim": 32,
    },
    audio={
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 80,
        "max_source_positions": 50,
    },
    window_s=1.0,
)  # fmt: skip


def write_composition(directory: Path, shapes: Shapes, device: torch.device) -> None:
    """Decoder, both towers, their projectors, tokenizer and template; weights are drawn on `device`, in bfloat16."""
    side, patch = shapes.vision["image_size"], shapes.vision["patch_size"]
    write_decoder(directory / "small", shapes.decoder, device)
    _write(CLIPVisionModel, CLIPVisionConfig(**shapes.vision), directory / "vision", device)
    _write(WhisperEncoder, WhisperConfig(**shapes.audio), directory / "audio", device)
    for kind, width in (("vision", shapes.vision["hidden_size"]), ("audio", shapes.audio["d_model"])):
        _write_projector(directory / f"{kind}-projector", width, shapes.decoder["hidden_size"], device)
    _write_tokenizer(directory, shapes.decoder["vocab_size"])
    (directory / "composition.toml").write_text(f"""\
name = "random"
tokenizer = "."

[decoders]
small = "small"

[vision]
encoder = "vision"
format = "clip"
placeholder = "<|image|><|/image|>"
around = ["<|image|>", "<|/image|>"]
feature_layer = -2
image_size = {side}
fit = "stretch"
tokens_per_item = {(side // patch) ** 2}
projectors = {{ small = "vision-projector/model.safetensors" }}

[audio]
encoder = "audio"
format = "whisper"
placeholder = "<|audio|><|/audio|>"
around = ["<|audio|>", "<|/audio|>"]
window_s = {shapes.window_s}
tokens_per_second = 25
projectors = {{ small = "audio-projector/model.safetensors" }}
""")


def write_llava(directory: Path, decoder: dict[str, Any], vision: dict[str, Any], device: torch.device) -> None:
    """A LLaVA 1.5 directory around these config fields of its two parts; weights are drawn on `device`, in bfloat16."""
    side = vision["image_size"]
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision), text_config=_decoder_config(decoder), image_token_index=SPECIAL.index(IMAGE)
    )
    _write(LlavaForConditionalGeneration, config, directory, device)
    pixels = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": pixels, "image_token": IMAGE}))
    _write_tokenizer(directory, decoder["vocab_size"])


def write_decoder(directory: Path, fields: dict[str, Any], device: torch.device) -> None:
    _write(LlamaForCausalLM, _decoder_config(fields), directory, device)


def _decoder_config(fields: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(**fields, tie_word_embeddings=False, bos_token_id=None, eos_token_id=SPECIAL.index(END))


def _write(kind: Any, config: PretrainedConfig, directory: Path, device: torch.device) -> None:
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in kind(config).state_dict().items()}
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    save_torch_state_dict({name: _drawn(name, shape, device) for name, shape in shapes.items()}, directory)


def _drawn(name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Gains of 1, offsets of 0, and matrices that keep what they multiply about as large as it was."""
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), dtype=torch.bfloat16, device=device)
    width = shape[1] if "embed" not in name else 1
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(width**-0.5)


def _write_projector(directory: Path, num_in: int, num_out: int, device: torch.device) -> None:
    directory.mkdir(parents=True)
    shapes = {
        "linear_1.weight": (num_out, num_in),
        "linear_1.bias": (num_out,),
        "linear_2.weight": (num_out, num_out),
        "linear_2.bias": (num_out,),
    }
    save_torch_state_dict({name: _drawn(name, torch.Size(shape), device) for name, shape in shapes.items()}, directory)


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Bytes, and words that nothing merges into, up to the decoder's vocabulary: every id that can be drawn has a text.

    The special tokens and the template between them are the bundled model's.
    """
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{i}" for i in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
