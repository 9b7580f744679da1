"""Our Llama over pages against transformers' without them."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from paged_decoder import Paged, random_ids
from step_plans import Row, num_blocks_for
from tiny_model import build_decoder
from transformers import LlamaForCausalLM

from mmserve.plan import BlockCopy

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "grouped": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    "one group": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3},
    "llama3 rope, untied, biased": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 8, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=SHAPES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(1)
    build_decoder(directory, **SHAPES[request.param])
    return directory


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    torch.manual_seed(2)
    build_decoder(directory, **SHAPES["grouped"])
    return directory


@pytest.fixture(params=[16, 256])
def block_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@functools.cache
def reference(directory: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def oracle(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    return reference(directory)(torch.tensor([token_ids])).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_whole_prompt_gives_the_logits_of_transformers(model_dir: Path, block_size: int) -> None:
    prompt = random_ids(150, 3)
    (logits,) = Paged.load(model_dir, block_size).run([Row(prompt, range(num_blocks_for(150, block_size)))])
    assert_close(logits, oracle(model_dir, prompt))


def test_chunks_and_single_tokens_give_the_logits_of_one_pass(model_dir: Path, block_size: int) -> None:
    prompt, paged = random_ids(90, 4), Paged.load(model_dir, block_size)
    cuts = [0, 1, 17, 64, 65, 66, 90]
    blocks = list(range(7, 7 + num_blocks_for(90, block_size)))
    parts = [paged.run([Row(prompt, blocks, start, stop)])[0] for start, stop in itertools.pairwise(cuts)]
    assert_close(torch.cat(parts), oracle(model_dir, prompt))


def test_decodes_and_prefills_of_many_lengths_share_a_step(plain_dir: Path, block_size: int) -> None:
    paged = Paged.load(plain_dir, block_size, num_blocks=400)
    sequences = [random_ids(length, length) for length in (1, 2, 15, 16, 17, 33, 100, 300)]
    free = list(range(399, -1, -1))
    tables = [[free.pop() for _ in range(num_blocks_for(len(sequence), block_size))] for sequence in sequences]
    for sequence, table in zip(sequences[1:], tables[1:], strict=True):
        paged.run([Row(sequence, table, 0, len(sequence) - 1)])
    # Decodes and prefills in turn: nothing may rely on decodes coming first.
    fresh = random_ids(40, 99)
    fresh_blocks = [free.pop() for _ in range(num_blocks_for(40, block_size))]
    rows = [Row(sequence, table, len(sequence) - 1) for sequence, table in zip(sequences, tables, strict=True)]
    rows.insert(3, Row(fresh, fresh_blocks))
    logits = paged.run(rows)
    for got, row in zip(logits, rows, strict=True):
        assert_close(got[-1], oracle(plain_dir, row.token_ids)[-1])


def test_shared_blocks_and_a_copied_tail_serve_a_second_sequence(plain_dir: Path, block_size: int) -> None:
    paged = Paged.load(plain_dir, block_size, num_blocks=60)
    shared = 2 * block_size + 8  # two whole blocks, and a part of a third
    first = random_ids(2 * block_size + block_size, 5)
    second = first[:shared] + random_ids(30, 6)
    paged.run([Row(first, [4, 9, 2])])
    (logits,) = paged.run([Row(second, [4, 9, 7, 8, 12], start=shared)], copies=[BlockCopy(source=2, target=7, num_tokens=8)])
    assert_close(logits, oracle(plain_dir, second)[shared:])
    # The copy is a copy: what the second wrote behind it never reached the first.
    (again,) = paged.run([Row([*first, 5], [4, 9, 2, 11], start=len(first))])
    assert_close(again, oracle(plain_dir, [*first, 5])[-1:])


def test_a_decode_alone_and_among_others_agrees_to_rounding(plain_dir: Path, block_size: int) -> None:
    paged = Paged.load(plain_dir, block_size, num_blocks=700)
    lengths = [40 + 9 * i for i in range(24)]
    sequences = [random_ids(length, i) for i, length in enumerate(lengths)]
    free = list(range(700))
    tables = [[free.pop() for _ in range(num_blocks_for(length, block_size))] for length in lengths]
    for sequence, table in zip(sequences, tables, strict=True):
        paged.run([Row(sequence, table, 0, len(sequence) - 1)])
    rows = [Row(sequence, table, len(sequence) - 1) for sequence, table in zip(sequences, tables, strict=True)]
    together = paged.run(rows)
    for row, logits in zip(rows, together, strict=True):
        (alone,) = paged.run([row])
        torch.testing.assert_close(logits, alone, rtol=2e-4, atol=2e-4)
        assert logits.argmax() == alone.argmax()


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_logits_of_one_pass(plain_dir: Path, block_size: int, seed: int) -> None:
    chance = random.Random(seed)
    paged = Paged.load(plain_dir, block_size, num_blocks=200)
    sequences = [random_ids(chance.randint(1, 120), 1000 * seed + i) for i in range(6)]
    free = list(range(200))
    chance.shuffle(free)
    tables = [[free.pop() for _ in range(num_blocks_for(len(sequence), block_size))] for sequence in sequences]
    num_computed, logits = [0] * 6, [torch.empty(0, 424) for _ in sequences]
    while unfinished := [i for i in range(6) if num_computed[i] < len(sequences[i])]:
        chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        stops = [min(len(sequences[i]), num_computed[i] + chance.choice([1, 1, 2, 7, 50])) for i in chosen]
        rows = [Row(sequences[i], tables[i], num_computed[i], stop) for i, stop in zip(chosen, stops, strict=True)]
        for i, stop, part in zip(chosen, stops, paged.run(rows), strict=True):
            num_computed[i] = stop
            logits[i] = torch.cat([logits[i], part])
    for sequence, got in zip(sequences, logits, strict=True):
        assert_close(got, oracle(plain_dir, sequence))


def test_garbage_in_blocks_of_others_and_in_free_slots_changes_nothing(plain_dir: Path, block_size: int) -> None:
    prompt, other = random_ids(20, 7), random_ids(45, 8)
    paged = Paged.load(plain_dir, block_size, num_blocks=10)
    blocks = [3, 5]
    paged.run([Row(prompt, blocks, 0, 19), Row(other, [6, 7, 8], 0, 44)])
    others = sorted(set(range(10)) - {3, 5, 6, 7, 8})
    for pool in paged.attention._pools:
        pool[:, others] = float("nan")
    # Tables are padded with block 0, which now holds NaN.
    logits = paged.run([Row(prompt, blocks, 19), Row(other, [6, 7, 8], 44)])
    assert_close(logits[0], oracle(plain_dir, prompt)[-1:])
    assert_close(logits[1], oracle(plain_dir, other)[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_full_precision(plain_dir: Path, dtype: torch.dtype) -> None:
    prompt = random_ids(30, 9)
    paged = Paged.load(plain_dir, dtype=dtype)
    rows = [paged.run([Row(prompt, [2, 1], *cut)])[0] for cut in ((0, 29), (29, 30))]
    logits, expected = torch.cat(rows), oracle(plain_dir, prompt)
    assert logits.dtype == torch.float32
    assert ((logits - expected).norm() / expected.norm()).item() < 0.05
