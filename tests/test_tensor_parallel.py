"""Two ranks over gloo against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from decoder_rank import measure, run_rank
from paged_decoder import CPU
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mmserve.models.decoder import Decoder
from mmserve.models.parallel import WHOLE, Shard

VOCAB_SIZE = 161  # the ranks' parts of the vocabulary are not equal
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 13, "num_key_value_heads": 1},  # both ranks hold the one key head
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 4},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By model type: the whole decoder's, then each rank's."""
    root = tmp_path_factory.mktemp("ranks")
    for seed, (model_type, fields) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**(SHAPE | fields)))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += torch.randn_like(parameter) * 0.2
        model.save_pretrained(root / model_type)
    mp.spawn(run_rank, (root, tuple(CASES)), nprocs=2)
    ranks = [torch.load(root / f"rank-{rank}.pt") for rank in range(2)]
    return {name: [measure(root / name, WHOLE), *(rank[name] for rank in ranks)] for name in CASES}


@pytest.mark.parametrize("model_type", CASES)
def test_two_ranks_give_the_logits_and_tokens_of_one(results: dict[str, list[dict[str, Any]]], model_type: str) -> None:
    whole, *ranks = results[model_type]
    for rank in ranks:
        torch.testing.assert_close(rank["prompt"], whole["prompt"], rtol=0, atol=1e-4)
        torch.testing.assert_close(rank["logits"], whole["logits"], rtol=0, atol=1e-4)
        assert rank["token_ids"] == whole["token_ids"]
        assert rank["heads"] == whole["heads"] // 2


@pytest.mark.parametrize("model_type", CASES)
def test_both_ranks_get_the_same_bits(results: dict[str, list[dict[str, Any]]], model_type: str) -> None:
    _, first, second = results[model_type]
    # Each samples for itself: a last bit of difference would let their sequences part.
    assert torch.equal(first["logits"], second["logits"])


def test_parts_cover_a_count_once() -> None:
    for count, size in ((161, 2), (7, 3), (6, 6), (3, 4)):
        parts = [Shard(rank, size).part(count) for rank in range(size)]
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
        assert max(part.stop - part.start for part in parts) == Shard(0, size).width(count)


def test_key_heads_are_split_repeated_or_refused() -> None:
    assert [Shard(rank, 2).of_kv_heads(4) for rank in range(2)] == [Shard(0, 2), Shard(1, 2)]
    assert [Shard(rank, 4).of_kv_heads(2) for rank in range(4)] == [Shard(0, 2), Shard(0, 2), Shard(1, 2), Shard(1, 2)]
    with pytest.raises(ValueError, match="3 key-value heads can neither be split nor repeated over 2 ranks"):
        Shard(0, 2).of_kv_heads(3)


def test_a_decoder_that_does_not_divide_is_refused_with_both_numbers(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="4 attention heads can't be split over 3 ranks"):
        Decoder.load(tmp_path, CPU, torch.float32, shard=Shard(0, 3))
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        Shard(2, 2)


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_refuses_a_vocabulary_that_leaves_one_of_them_nothing(tmp_path: Path, rank: int) -> None:
    """Five tokens over four ranks are 2, 2, 1 and 0: all must say so, or those that don't wait in a collective for ever."""
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**(SHAPE | {"vocab_size": 5}))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="5 tokens of vocabulary leave nothing for some of 4 ranks"):
        Decoder.load(tmp_path, CPU, torch.float32, shard=Shard(rank, 4))


def test_a_vocabulary_of_which_each_rank_gets_some_is_split() -> None:
    for count, size in ((161, 2), (4, 4), (7, 4), (1, 1)):
        Shard(0, size).require_part_each(count, "tokens")
