"""A Llama-family `config.json`, parsed once into numbers that can't be wrong.

Llama's defaults are filled in (text configs inside multi-modal ones leave them out); what isn't built is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmserve.models.weights import BadCheckpoint

_MODEL_TYPES = ("llama",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of low frequencies; see `inverse_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope_theta: float
    rope_scaling: RopeScaling | None

    @property
    def kv_bytes_per_token(self) -> int:
        """At one byte an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_config(directory: Path) -> DecoderConfig:
    """Raises BadCheckpoint naming the field that is missing or asks for what isn't built."""
    return parse_config(json.loads((directory / "config.json").read_text()))


def parse_config(data: Mapping[str, Any]) -> DecoderConfig:
    _require(data, "model_type", _MODEL_TYPES)
    _require(data, "hidden_act", ("silu", None))
    if data.get("quantization_config") is not None:
        raise BadCheckpoint("config.json: quantization_config is not supported")
    rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    try:
        num_heads = int(data.get("num_attention_heads", 32))
        hidden_size = int(data.get("hidden_size", 4096))
        config = DecoderConfig(
            vocab_size=int(data.get("vocab_size", 32000)),
            hidden_size=hidden_size,
            intermediate_size=int(data.get("intermediate_size", 11008)),
            num_layers=int(data.get("num_hidden_layers", 32)),
            num_heads=num_heads,
            num_kv_heads=int(data.get("num_key_value_heads") or num_heads),
            head_dim=int(data.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(data.get("max_position_embeddings", 2048)),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            attention_bias=bool(data.get("attention_bias", False)),
            mlp_bias=bool(data.get("mlp_bias", False)),
            rope_theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0),
            rope_scaling=_parse_scaling(rope),
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"config.json: {error}") from error
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise BadCheckpoint(
            f"config.json: {config.num_heads} heads over {config.num_kv_heads} key-value heads of size {config.head_dim} don't divide"
        )
    return config


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """float64 [head_dim / 2], radians per position.

    With `rope_type` llama3, wavelengths beyond original / low_freq_factor are stretched by `factor`, those below original /
    high_freq_factor are left alone, and those between are blended (Llama 3.1's reference code).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _parse_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise BadCheckpoint(f"config.json: rope_type must be default or llama3, got {kind!r}")
    try:
        return RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise BadCheckpoint(f"config.json: rope_parameters lack {error.args[0]}") from error


def _require(data: Mapping[str, Any], field: str, allowed: tuple[str | None, ...]) -> None:
    if data.get(field) not in allowed:
        raise BadCheckpoint(f"config.json: {field} must be {allowed[0]}, got {data.get(field)!r}")
