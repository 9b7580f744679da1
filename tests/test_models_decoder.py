"""Our Llama over pages against transformers' without them."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from step_plans import Row, num_blocks_for, step_plan
from tiny_model import build_decoder
from transformers import LlamaForCausalLM

from mmserve.models.decoder import Decoder
from mmserve.models.decoder_config import parse_config, read_config
from mmserve.models.paged_attention import PagedAttention
from mmserve.models.weights import BadCheckpoint
from mmserve.plan import BlockCopy

CPU = torch.device("cpu")
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


class Paged:
    """A decoder with its pool; `run` gives the logits of every token of every row."""

    def __init__(self, directory: Path, block_size: int, num_blocks: int = 40) -> None:
        self.block_size = block_size
        self.decoder = Decoder.load(directory, CPU, torch.float32)
        config = self.decoder.config
        self.attention = PagedAttention(
            num_layers=config.num_layers, num_blocks=num_blocks, block_size=block_size, num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, device=CPU, dtype=torch.float32,
        )  # fmt: skip

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], copies: Sequence[BlockCopy] = ()) -> list[torch.Tensor]:
        plan = step_plan(rows, self.block_size, copies=copies)
        self.attention.copy_blocks(plan.copies)
        hidden = self.decoder.embed(torch.from_numpy(plan.token_ids).long())
        positions = torch.from_numpy(plan.positions[0]).long()
        hidden = self.decoder.forward(hidden, positions, self.attention, self.attention.plan(plan))
        return list(self.decoder.logits(hidden).split([int(n) for n in plan.query_starts[1:] - plan.query_starts[:-1]]))


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


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 424, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_whole_prompt_gives_the_logits_of_transformers(model_dir: Path, block_size: int) -> None:
    prompt = ids(150, 3)
    (logits,) = Paged(model_dir, block_size).run([Row(prompt, range(num_blocks_for(150, block_size)))])
    assert_close(logits, oracle(model_dir, prompt))


def test_chunks_and_single_tokens_give_the_logits_of_one_pass(model_dir: Path, block_size: int) -> None:
    prompt, paged = ids(90, 4), Paged(model_dir, block_size)
    cuts = [0, 1, 17, 64, 65, 66, 90]
    blocks = list(range(7, 7 + num_blocks_for(90, block_size)))
    parts = [paged.run([Row(prompt, blocks, start, stop)])[0] for start, stop in itertools.pairwise(cuts)]
    assert_close(torch.cat(parts), oracle(model_dir, prompt))


def test_decodes_and_prefills_of_many_lengths_share_a_step(plain_dir: Path, block_size: int) -> None:
    paged = Paged(plain_dir, block_size, num_blocks=400)
    sequences = [ids(length, length) for length in (1, 2, 15, 16, 17, 33, 100, 300)]
    free = list(range(399, -1, -1))
    tables = [[free.pop() for _ in range(num_blocks_for(len(sequence), block_size))] for sequence in sequences]
    for sequence, table in zip(sequences[1:], tables[1:], strict=True):
        paged.run([Row(sequence, table, 0, len(sequence) - 1)])
    # Decodes and prefills in turn: nothing may rely on decodes coming first.
    fresh = ids(40, 99)
    fresh_blocks = [free.pop() for _ in range(num_blocks_for(40, block_size))]
    rows = [Row(sequence, table, len(sequence) - 1) for sequence, table in zip(sequences, tables, strict=True)]
    rows.insert(3, Row(fresh, fresh_blocks))
    logits = paged.run(rows)
    for got, row in zip(logits, rows, strict=True):
        assert_close(got[-1], oracle(plain_dir, row.token_ids)[-1])


def test_shared_blocks_and_a_copied_tail_serve_a_second_sequence(plain_dir: Path, block_size: int) -> None:
    paged = Paged(plain_dir, block_size, num_blocks=60)
    shared = 2 * block_size + 8  # two whole blocks, and a part of a third
    first = ids(2 * block_size + block_size, 5)
    second = first[:shared] + ids(30, 6)
    paged.run([Row(first, [4, 9, 2])])
    (logits,) = paged.run([Row(second, [4, 9, 7, 8, 12], start=shared)], copies=[BlockCopy(source=2, target=7, num_tokens=8)])
    assert_close(logits, oracle(plain_dir, second)[shared:])
    # The copy is a copy: what the second wrote behind it never reached the first.
    (again,) = paged.run([Row([*first, 5], [4, 9, 2, 11], start=len(first))])
    assert_close(again, oracle(plain_dir, [*first, 5])[-1:])


def test_a_decode_alone_and_among_others_agrees_to_rounding(plain_dir: Path, block_size: int) -> None:
    paged = Paged(plain_dir, block_size, num_blocks=700)
    lengths = [40 + 9 * i for i in range(24)]
    sequences = [ids(length, i) for i, length in enumerate(lengths)]
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
    paged = Paged(plain_dir, block_size, num_blocks=200)
    sequences = [ids(chance.randint(1, 120), 1000 * seed + i) for i in range(6)]
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
    prompt, other = ids(20, 7), ids(45, 8)
    paged = Paged(plain_dir, block_size, num_blocks=10)
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
    prompt = ids(30, 9)
    decoder = Decoder.load(plain_dir, CPU, dtype)
    config = decoder.config
    attention = PagedAttention(
        num_layers=config.num_layers, num_blocks=4, block_size=16, num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, device=CPU, dtype=dtype,
    )  # fmt: skip
    rows = []
    with torch.inference_mode():
        for start, stop in ((0, 29), (29, 30)):
            plan = step_plan([Row(prompt, [2, 1], start, stop)], 16)
            hidden = decoder.embed(torch.from_numpy(plan.token_ids).long())
            hidden = decoder.forward(hidden, torch.from_numpy(plan.positions[0]).long(), attention, attention.plan(plan))
            rows.append(decoder.logits(hidden))
    logits, expected = torch.cat(rows), oracle(plain_dir, prompt)
    assert logits.dtype == torch.float32
    assert ((logits - expected).norm() / expected.norm()).item() < 0.05


def rewritten(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def test_missing_misshapen_and_unknown_tensors_are_all_named(plain_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(plain_dir / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 95)
    tensors["model.layers.7.mlp.down_proj.weight"] = torch.zeros(2)
    with pytest.raises(BadCheckpoint) as caught:
        Decoder.load(rewritten(plain_dir, tmp_path / "bad", tensors), CPU, torch.float32)
    message = str(caught.value)
    assert "missing model.norm.weight" in message
    assert "model.layers.0.mlp.down_proj.weight has shape [64, 95], expected [64, 96]" in message
    assert "unknown model.layers.7.mlp.down_proj.weight" in message


def test_a_directory_without_safetensors_is_refused(plain_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((plain_dir / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle that must not be opened")
    with pytest.raises(BadCheckpoint, match="no safetensors"):
        Decoder.load(tmp_path, CPU, torch.float32)


def test_shards_and_computed_leftovers_are_read_like_one_file(plain_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(plain_dir / "model.safetensors")
    names = sorted(tensors)
    directory = rewritten(plain_dir, tmp_path / "sharded", {name: tensors[name] for name in names[:9]})
    rest = {name: tensors[name] for name in names[9:]}
    rest["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    rest["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(rest, directory / "model-00002-of-00002.safetensors")
    assert Decoder.load(directory, CPU, torch.float32).config.num_layers == 3


def test_old_and_new_spellings_of_rope_scaling_mean_the_same(plain_dir: Path) -> None:
    plain = json.loads((plain_dir / "config.json").read_text())
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    old = {name: value for name, value in plain.items() if name != "rope_parameters"}
    old |= {"rope_theta": 10000.0, "rope_scaling": scaling}
    assert parse_config(old) == parse_config(plain | {"rope_parameters": LLAMA3_ROPE})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
    ],
)
def test_what_is_not_built_is_refused_by_name(plain_dir: Path, change: dict[str, object], named: str) -> None:
    data = json.loads((plain_dir / "config.json").read_text())
    with pytest.raises(BadCheckpoint, match=named):
        parse_config(data | change)


def test_a_config_without_defaults_is_filled_with_llamas(plain_dir: Path) -> None:
    config = parse_config({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.num_layers) == (4, 16, 10000.0, 32)
    assert read_config(plain_dir).head_dim == 16
