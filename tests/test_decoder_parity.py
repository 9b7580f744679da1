"""Every supported model type and feature against transformers, on random weights saved as people's are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_decoder import CPU, Paged, random_ids
from safetensors.torch import save_file
from step_plans import Row, num_blocks_for
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerTextModel
from transformers.utils.logging import disable_progress_bar

from mmserve.models.decoder import Decoder

VOCAB_SIZE = 160
ORIGINAL = 48  # tokens of the context that scalings stretch
PROMPT = random_ids(40, 1, VOCAB_SIZE)  # what follows it leaves the original context
LONG_PROMPT = random_ids(120, 2, VOCAB_SIZE)
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 8.0}
WINDOW = {"sliding_window": 13}
CASES: dict[str, dict[str, Any]] = {
    "llama, grouped heads": {},
    "llama, one key head, untied": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False},
    "llama, no groups, tied": {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "llama, all biases": {"attention_bias": True, "mlp_bias": True},
    "llama, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
    "llama, dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}, "max_position_embeddings": ORIGINAL,
    },
    "llama, llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        }
    },
    "llama, yarn": {"rope_parameters": YARN},
    "llama, yarn, mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "llama, yarn, not truncated": {"rope_parameters": YARN | {"attention_factor": 0.9, "truncate": False}},
    "mistral, no window": {"sliding_window": None},
    "mistral, window": WINDOW,
    "mistral, window, linear": WINDOW | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "qwen2": {},
    "qwen2, tied, yarn": {"tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen2, window above a layer": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2, unused window": WINDOW | {"use_sliding_window": False, "max_window_layers": 0},
    "qwen3": {},
    "qwen3, tied, biased": {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3, window in a layer": WINDOW | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3, yarn": {"rope_parameters": YARN},
}  # fmt: skip


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Biases and norms are 0 and 1 in a fresh model, and so would hide being swapped or left out."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model.eval()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    return tmp_path_factory.mktemp("parity")


@functools.cache
def saved(root: Path, case: str) -> tuple[Path, PreTrainedModel]:
    torch.manual_seed(len(case))
    config = CONFIG_MAPPING[case.split(",")[0]](**(SHAPE | CASES[case]))
    model = randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.save_pretrained(root / case)
    return root / case, model


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_and_their_logits_are_those_of_transformers(root: Path, case: str) -> None:
    directory, model = saved(root, case)
    token_ids, logits = Paged.load(directory).greedy(PROMPT, 64)
    expected_ids, expected = greedy(model, PROMPT, 64)
    assert token_ids == expected_ids
    assert largest_difference(logits, expected) < 1e-4


@pytest.mark.parametrize("case", [case for case in CASES if "dynamic" not in case])
def test_a_whole_prompt_gives_the_logits_of_transformers(root: Path, case: str) -> None:
    directory, model = saved(root, case)
    (logits,) = Paged.load(directory).run([Row(LONG_PROMPT, range(8))])
    with torch.inference_mode():
        expected = model(torch.tensor([LONG_PROMPT])).logits[0]
    assert largest_difference(logits, expected) < 1e-4


def test_a_prompt_within_the_original_context_is_untouched_by_dynamic_scaling(root: Path) -> None:
    directory, model = saved(root, "llama, dynamic")
    prompt = LONG_PROMPT[: ORIGINAL - 1]  # only below it does transformers forget a longer context that it saw before
    (logits,) = Paged.load(directory).run([Row(prompt, range(8))])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    assert largest_difference(logits, expected) < 1e-4


@pytest.mark.parametrize("case", ["llama, dynamic", "mistral, window", "qwen2, window above a layer", "qwen3, yarn"])
def test_no_chunk_size_changes_the_logits(root: Path, case: str) -> None:
    paged = Paged.load(saved(root, case)[0])
    prompt = LONG_PROMPT[:50]
    blocks = range(num_blocks_for(50, paged.block_size))
    (whole,) = paged.run([Row(prompt, blocks)])
    for size in range(1, 34):
        cuts = [*range(0, 50, size), 50]
        parts = [paged.run([Row(prompt, blocks, start, stop)])[0] for start, stop in itertools.pairwise(cuts)]
        assert largest_difference(torch.cat(parts), whole) < 1e-4, f"in chunks of {size}"


def test_positions_of_several_axes_turn_their_own_sections_of_a_head(root: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["qwen2_5_omni_text"](
        **SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}, tie_word_embeddings=True
    )
    model = randomised(Qwen2_5OmniThinkerTextModel(config))
    (root / "omni").mkdir()
    save_file({f"thinker.{name}": tensor for name, tensor in model.state_dict().items()}, root / "omni" / "model.safetensors")
    # The text model of this multi-modal type is a Qwen2 with sections.
    decoder = Decoder.load(
        root / "omni", CPU, torch.float32,
        config=config.to_dict() | {"model_type": "qwen2"}, names=lambda name: name.replace("thinker.", "model."),
    )  # fmt: skip
    prompt = PROMPT[:30]
    positions = torch.randint(0, 60, (3, 30), generator=torch.Generator().manual_seed(3))
    blocks = range(4)
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt]), position_ids=positions[:, None]).last_hidden_state[0]
        expected = hidden @ model.embed_tokens.weight.T
    paged = Paged(decoder)
    parts = [paged.run([Row(prompt, blocks, *cut)], positions=positions[:, slice(*cut)])[0] for cut in ((0, 17), (17, 18), (18, 30))]
    assert largest_difference(torch.cat(parts), expected) < 1e-4
    # Text has the same position on all axes.
    (text,) = Paged(decoder).run([Row(prompt, blocks)])
    (again,) = Paged(decoder).run([Row(prompt, blocks)], positions=torch.arange(30).expand(3, 30))
    assert torch.equal(text, again)
