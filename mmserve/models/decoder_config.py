"""A decoder's `config.json`, parsed once into numbers that can't be wrong.

What a file leaves out is filled in with its model type's own defaults; what isn't built is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmserve.composition.decoder_config import complete_config, longest_context
from mmserve.composition.weights import BadModel
from mmserve.models.rotary import Rope, parse_rope
from mmserve.models.weights import BadCheckpoint

_HAVE_ATTENTION_BIAS_FIELD = frozenset({"llama", "qwen3"})  # of query, key, value and output alike
_ALWAYS_QKV_BIAS = frozenset({"qwen2"})
_HAVE_MLP_BIAS_FIELD = frozenset({"llama"})
_HAVE_QK_NORM = frozenset({"qwen3"})
_HAVE_WINDOWS = frozenset({"mistral", "qwen2", "qwen3"})
_IS_SLIDING = MappingProxyType({"sliding_attention": True, "full_attention": False})


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # the longest context, stretching included
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each head of queries and keys, before they are rotated
    windows: tuple[int | None, ...]  # of each layer: how many tokens one sees, itself included; None: all before it
    rope: Rope

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def kv_bytes_per_token(self) -> int:
        """At one byte an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_config(directory: Path) -> DecoderConfig:
    """Raises BadCheckpoint naming the field that is missing or asks for what isn't built."""
    try:
        data = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{directory / 'config.json'}: {error}") from error
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> DecoderConfig:
    """From the fields of a `config.json`, or of the text config inside one.  Raises BadCheckpoint naming what doesn't fit."""
    try:
        config = _build(complete_config(data))
    except BadCheckpoint:
        raise
    except (BadModel, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadCheckpoint(f"config.json: {error}") from error
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise BadCheckpoint(
            f"config.json: {config.num_heads} heads over {config.num_kv_heads} key-value heads of size {config.head_dim} don't divide"
        )
    return config


def _build(fields: Mapping[str, Any]) -> DecoderConfig:
    if fields["hidden_act"] != "silu":
        raise BadCheckpoint(f"config.json: hidden_act must be silu, got {fields['hidden_act']!r}")
    if fields.get("quantization_config") is not None:
        raise BadCheckpoint("config.json: quantization_config is not supported")
    model_type, head_dim = fields["model_type"], int(fields["head_dim"])
    attention_bias = model_type in _HAVE_ATTENTION_BIAS_FIELD and bool(fields.get("attention_bias"))
    return DecoderConfig(
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=int(fields["intermediate_size"]),
        num_heads=int(fields["num_attention_heads"]),
        num_kv_heads=int(fields["num_key_value_heads"]),
        head_dim=head_dim,
        rms_norm_eps=float(fields["rms_norm_eps"]),
        max_position_embeddings=longest_context(fields),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        qkv_bias=attention_bias or model_type in _ALWAYS_QKV_BIAS,
        out_bias=attention_bias,
        mlp_bias=model_type in _HAVE_MLP_BIAS_FIELD and bool(fields.get("mlp_bias")),
        qk_norm=model_type in _HAVE_QK_NORM,
        windows=_windows(fields),
        rope=parse_rope(fields, head_dim),
    )


def _windows(fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers = int(fields["num_hidden_layers"])
    window = fields.get("sliding_window")
    if fields["model_type"] not in _HAVE_WINDOWS or not fields.get("use_sliding_window", True) or window is None:
        return (None,) * num_layers
    layer_types = fields.get("layer_types")
    if layer_types is None:
        first = int(fields.get("max_window_layers", 0))  # the layers below it see everything
        return tuple(int(window) if i >= first else None for i in range(num_layers))
    unknown = sorted({str(kind) for kind in layer_types} - set(_IS_SLIDING))
    if unknown or len(layer_types) != num_layers:
        raise BadCheckpoint(f"config.json: layer_types must be {num_layers} of {', '.join(_IS_SLIDING)}, got {unknown or len(layer_types)}")
    return tuple(int(window) if _IS_SLIDING[kind] else None for kind in layer_types)
