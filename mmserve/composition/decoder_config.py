"""A decoder's config with what its file leaves out: text configs inside multi-modal ones hold only what isn't their type's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmserve.composition.weights import BadModel

_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # hidden_size / heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_MISTRAL = _LLAMA | {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
_QWEN2 = _LLAMA | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
}
"""By model type: the field defaults of the configuration classes of transformers, as far as a decoder's shape depends on them."""

_MULTIPLYING = ("linear", "dynamic", "yarn")  # kinds of rotary scaling


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that a decoder's shape depends on is there and not None.  Raises BadModel for a model type that isn't built."""
    model_type = config.get("model_type", "llama")
    if model_type not in DEFAULTS:
        raise BadModel(f"decoders of type {model_type!r} are not supported; supported are {', '.join(DEFAULTS)}")
    complete = {**DEFAULTS[model_type], **config, "model_type": model_type}
    if complete["num_key_value_heads"] is None:
        complete["num_key_value_heads"] = complete["num_attention_heads"]
    if complete["head_dim"] is None:
        complete["head_dim"] = complete["hidden_size"] // complete["num_attention_heads"]
    return complete


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary part of a decoder's config, whichever way its file spells it, with `rope_type`.

    `original_max_position_embeddings`, the length before it was stretched, is the config's own where nothing else is said.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = rope.pop("type", "default")
    rope.setdefault("rope_type", kind)
    if rope["rope_type"] == "mrope":  # Qwen2-VL's first spelling: the sections say it
        rope["rope_type"] = "default"
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return {**rope, "original_max_position_embeddings": original or config["max_position_embeddings"]}


def longest_context(config: Mapping[str, Any]) -> int:
    """Tokens: what `max_position_embeddings` says, multiplied where files give the length before it was stretched.

    Linear and dynamic scaling multiply that very length, yarn the original one; of any other kind it is the last word.  This is how
    vLLM reads them, too.  Raises BadModel.
    """
    rope = rope_parameters(config)
    length, factor = config["max_position_embeddings"], rope.get("factor")
    try:
        if rope["rope_type"] not in _MULTIPLYING or not factor:
            return int(length)
        if rope["rope_type"] == "yarn":
            length = rope["original_max_position_embeddings"]
        return int(int(length) * float(factor))
    except (TypeError, ValueError) as error:
        raise BadModel(f"the longest context can't be read: {error}") from error
