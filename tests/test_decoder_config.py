"""Decoder configs as files spell them, complete and not."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from mmserve.composition import BadModel, DecoderSpec, PromptFormat, Weights
from mmserve.composition.decoder_config import complete_config, longest_context
from mmserve.models.decoder_config import parse_config, read_config
from mmserve.models.rotary import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from mmserve.models.weights import BadCheckpoint

LLAMA = {
    "model_type": "llama", "vocab_size": 424, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_file_leaves_out_is_the_default_of_its_model_type(model_type: str) -> None:
    full = CONFIG_MAPPING[model_type]()
    config = parse_config({"model_type": model_type})
    assert config == parse_config(full.to_dict())
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (full.vocab_size, full.hidden_size, full.intermediate_size)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (
        full.num_hidden_layers, full.num_attention_heads, full.num_key_value_heads,
    )  # fmt: skip
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (full.rms_norm_eps, full.tie_word_embeddings)
    assert (config.max_position_embeddings, config.rope.theta) == (full.max_position_embeddings, full.rope_parameters["rope_theta"])


def test_heads_are_as_wide_as_the_file_says_or_as_the_hidden_size_leaves_room() -> None:
    assert parse_config(LLAMA).head_dim == 16
    assert parse_config(LLAMA | {"head_dim": 24}).head_dim == 24
    assert parse_config(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize("scaling", [LLAMA3_SCALING, {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 4.0}])
def test_old_and_new_spellings_of_rope_scaling_mean_the_same(scaling: dict[str, object]) -> None:
    old = LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling}
    assert parse_config(old) == parse_config(LLAMA | {"rope_parameters": {**scaling, "rope_theta": 500000.0}})


def test_scalings_are_those_of_the_file() -> None:
    def parsed(**scaling: object) -> object:
        return parse_config(LLAMA | {"max_position_embeddings": 1000, "rope_scaling": scaling}).rope.scaling

    assert parsed(type="linear", factor=2.5) == LinearScaling(2.5)
    assert parsed(type="dynamic", factor=4.0) == DynamicScaling(4.0, 1000)
    assert parsed(**LLAMA3_SCALING) == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert parsed(type="yarn", factor=4.0, original_max_position_embeddings=500) == YarnScaling(4.0, 500, 32.0, 1.0, True)
    assert parsed(type="yarn", original_max_position_embeddings=250) == YarnScaling(4.0, 250, 32.0, 1.0, True)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({}, 1000),
        ({"rope_type": "default"}, 1000),
        ({"type": "mrope", "mrope_section": [2, 3, 3], "factor": 2.0}, 1000),
        ({"type": "linear", "factor": 2.5}, 2500),
        ({"rope_type": "dynamic", "factor": 4.0}, 4000),
        (LLAMA3_SCALING, 1000),  # Llama 3's files name the stretched length
        ({"rope_type": "yarn", "factor": 4.0}, 4000),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),  # as Qwen's do
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),  # as DeepSeek's do
        ({"type": "yarn", "original_max_position_embeddings": 250}, 1000),
    ],
)
def test_main_and_workers_read_the_same_longest_context(scaling: dict[str, object], length: int, spelling: str) -> None:
    """Main used to take the file's word for it: prompts that the model serves were refused."""
    fields = LLAMA | {"max_position_embeddings": 1000, spelling: scaling}
    spec = DecoderSpec("small", Weights(Path("llama")), complete_config(fields), PromptFormat(Path("tokenizer.json"), None))
    assert (spec.max_model_len, parse_config(fields).max_position_embeddings) == (length, length)


def test_a_context_that_is_no_number_is_refused() -> None:
    with pytest.raises(BadModel, match=r"longest context can't be read.*long"):
        longest_context(LLAMA | {"max_position_embeddings": "long"})


def test_windows_are_those_of_each_model_type() -> None:
    def windows(model_type: str, **fields: object) -> tuple[int | None, ...]:
        return parse_config(LLAMA | {"model_type": model_type, "sliding_window": 9} | fields).windows

    assert windows("llama") == (None, None, None)  # it has no such field
    assert windows("mistral") == (9, 9, 9)
    assert windows("mistral", sliding_window=None) == (None, None, None)
    assert windows("qwen2", max_window_layers=0) == (None, None, None)
    assert windows("qwen2", use_sliding_window=True, max_window_layers=1) == (None, 9, 9)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("qwen3", use_sliding_window=True, layer_types=layer_types) == (9, None, 9)


def test_biases_are_those_of_each_model_type() -> None:
    def biases(model_type: str, **fields: object) -> tuple[bool, bool, bool]:
        config = parse_config(LLAMA | {"model_type": model_type} | fields)
        return config.qkv_bias, config.out_bias, config.mlp_bias

    asked = {"attention_bias": True, "mlp_bias": True}
    assert biases("llama") == (False, False, False)
    assert biases("llama", **asked) == (True, True, True)
    assert biases("mistral", **asked) == (False, False, False)
    assert biases("qwen2") == (True, False, False)
    assert biases("qwen3", **asked) == (True, True, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'.*llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type must be one of .*yarn.*'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "the same for all layers"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lack low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "lack factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"mrope_section": [2, 3, 4]}}, r"mrope_section \[2, 3, 4\] must be three numbers that add up to 8"),
        ({"rope_parameters": {"mrope_section": [2, 3, 3], "mrope_interleaved": True}}, "mrope_interleaved"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "4 heads over 3 key-value heads"),
        ({"intermediate_size": "wide"}, "wide"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types must be 3 of"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["odd"] * 3}, "odd"),
    ],
)
def test_what_is_not_built_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=named):
        parse_config(LLAMA | change)


def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(tmp_path)
