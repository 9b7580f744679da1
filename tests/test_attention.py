"""Both attention backends against the slow way, on the same steps: queries, keys and values without a decoder around them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import fake_flash_attn
import numpy as np
import pytest
import torch
from step_plans import Row, num_blocks_for, step_plan

from mmserve.config import ConfigError, kv_block_size
from mmserve.models.attention import AttentionBackend, AttentionShape
from mmserve.models.attention_choice import attention_for, flash_obstacle
from mmserve.models.attention_kernels import FusedKernels, ProductKernels
from mmserve.models.flash_attention import Decodes, FlashAttention, FlashPlan
from mmserve.models.torch_attention import TorchAttention
from mmserve.plan import BlockCopy

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 6, 2, 8
WINDOWS = (None, 20, 300)  # a layer of each


def by_products(shape: AttentionShape) -> TorchAttention:
    """As on a CPU that multiplies bfloat16 itself, on any."""
    backend = TorchAttention(shape)
    backend._kernels = ProductKernels()
    return backend


def by_gathered_products(shape: AttentionShape) -> TorchAttention:
    """As there with many query heads to a key head."""
    backend = by_products(shape)
    backend._kernels.max_in_place = 0
    return backend


def by_fused_kernel(shape: AttentionShape) -> TorchAttention:
    """As everywhere else."""
    backend = TorchAttention(shape)
    backend._kernels = FusedKernels()
    return backend


BACKENDS = {
    "torch fp32, blocks of 16": (by_fused_kernel, torch.float32, 16),
    "torch bf16, blocks of 256": (by_fused_kernel, torch.bfloat16, 256),
    "products fp32, blocks of 16": (by_products, torch.float32, 16),
    "products bf16, blocks of 256": (by_products, torch.bfloat16, 256),
    "products bf16, values gathered": (by_gathered_products, torch.bfloat16, 16),
    "flash bf16": (FlashAttention, torch.bfloat16, 256),
    "flash fp16, blocks of 512": (FlashAttention, torch.float16, 512),
}


@pytest.fixture(autouse=True)
def _flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)


def shape(
    dtype: torch.dtype = torch.bfloat16, block_size: int = 256, num_blocks: int = 12, windows: tuple[int | None, ...] = WINDOWS
) -> AttentionShape:
    return AttentionShape(windows, HEADS, KV_HEADS, DIM, num_blocks, block_size, CPU, dtype)


@dataclass
class World:
    """A backend, and beside it every sequence's queries, keys and values in full."""

    backend: AttentionBackend
    dtype: torch.dtype
    seed: int = 0
    told: dict[int, torch.Tensor] = field(default_factory=dict)  # [tokens, heads + 2 kv_heads, D] by sequence

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def step(self, rows: Sequence[tuple[int, Row]], copies: Sequence[BlockCopy] = ()) -> None:
        """Run the rows, (sequence, row) each, through every layer, and compare with the slow way."""
        plan = step_plan([row for _, row in rows], self.backend.block_size, copies=copies)
        self.backend.copy_blocks(plan.copies)
        new = torch.randn(len(plan.token_ids), HEADS + 2 * KV_HEADS, DIM, generator=self.generator).to(self.dtype)
        query, key, value = new.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        made = self.backend.plan(plan)
        outputs = [self.backend.forward(layer, query, key, value, made) for layer in range(len(WINDOWS))]
        for (name, row), (start, stop) in zip(rows, itertools.pairwise(plan.query_starts.tolist()), strict=True):
            before = self.told.get(name, new[:0])[: row.start]
            assert len(before) == row.start
            self.told[name] = torch.cat([before, new[start:stop]])
            for window, output in zip(WINDOWS, outputs, strict=True):
                expected = slow(self.told[name], stop - start, window)
                torch.testing.assert_close(output[start:stop].float(), expected, rtol=2e-2, atol=2e-2 if self.dtype.itemsize == 2 else 1e-5)


def slow(qkv: torch.Tensor, num_queries: int, window: int | None) -> torch.Tensor:
    """fp32 [num_queries, heads * D] of the last queries: over all keys, masked, in fp64."""
    query, key, value = (part.double().transpose(0, 1) for part in qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1))
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (key, value))
    scores = query[:, -num_queries:] @ key.transpose(1, 2) / DIM**0.5
    distance = torch.arange(len(qkv) - num_queries, len(qkv))[:, None] - torch.arange(len(qkv))
    is_seen = (distance >= 0) & (distance < (window or len(qkv)))
    return (scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ value).transpose(0, 1).flatten(1).float()


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest) -> World:
    kind, dtype, block_size = BACKENDS[request.param]
    return World(kind(shape(dtype, block_size, num_blocks=max(14, 2240 // block_size))), dtype)


def tokens(count: int) -> list[int]:
    return [0] * count  # ids mean nothing here


def test_decodes_prefills_and_continuations_of_many_lengths_share_a_step(world: World) -> None:
    size = world.backend.block_size
    lengths = [1, 2, 17, 255, 256, 257, 513]
    free = iter(random.Random(1).sample(range(world.backend.num_blocks), world.backend.num_blocks))
    tables = [[next(free) for _ in range(num_blocks_for(length + 2, size))] for length in lengths]
    # The same slot is never written by two, so all may start together.
    starts = [
        (i, Row(tokens(length), table, 0, length - 1)) for i, (length, table) in enumerate(zip(lengths, tables, strict=True)) if length > 1
    ]
    world.step(starts)
    rows = [(i, Row(tokens(length), table, length - 1)) for i, (length, table) in enumerate(zip(lengths, tables, strict=True))]
    rows[3] = (3, Row(tokens(257), tables[3], 254))  # a chunk behind cached keys
    rows.insert(2, (99, Row(tokens(5), [next(free)])))  # and a new prompt, among the decodes
    world.step(rows)


def test_a_prefill_alone_then_its_decode_alone(world: World) -> None:
    world.step([(0, Row(tokens(40), [2, 0, 1]))])
    world.step([(0, Row(tokens(41), [2, 0, 1], 40))])


def test_a_chunk_of_every_size_stays_within_its_window(world: World) -> None:
    blocks = list(range(num_blocks_for(60, world.backend.block_size)))
    start = 0
    for count in (1, 2, 19, 20, 1, 7, 10):
        world.step([(0, Row(tokens(start + count), blocks, start))])
        start += count


def test_a_copied_tail_serves_a_second_sequence_and_stays_the_firsts(world: World) -> None:
    size = world.backend.block_size
    shared = size + 5
    world.step([(0, Row(tokens(shared + 3), [4, 1]))])
    world.told[1] = world.told[0][:shared]
    world.step([(1, Row(tokens(shared + 9), [4, 5], shared))], copies=[BlockCopy(source=1, target=5, num_tokens=5)])
    world.step([(0, Row(tokens(shared + 4), [4, 1], shared + 3)), (1, Row(tokens(shared + 10), [4, 5], shared + 9))])


def test_what_is_wiped_is_zero_in_every_layer_and_nothing_else_is(world: World) -> None:
    world.step([(0, Row(tokens(10), [3]))])
    backend = world.backend
    before = [pool.clone() for pool in backend._pools]  # type: ignore[attr-defined]
    slots = np.arange(3 * backend.block_size + 4, 3 * backend.block_size + 7, dtype=np.int32)
    backend.wipe(slots)
    for old, pool in zip(before, backend._pools, strict=True):  # type: ignore[attr-defined]
        changed = (old != pool).nonzero()
        assert len(changed) == len(WINDOWS) * 3 * KV_HEADS * DIM
        assert set(changed[:, 1].tolist()) == {3}
        assert bool((pool[old != pool] == 0).all())


@pytest.mark.parametrize("size", [16, 256])
def test_a_window_reads_only_the_blocks_it_reaches(size: int) -> None:
    world = World(TorchAttention(shape(torch.float32, size)), torch.float32)
    length = 3 * size
    world.step([(0, Row(tokens(length), [6, 2, 0, 1]))])
    for pool in world.backend._pools:  # type: ignore[attr-defined]
        pool[1, 6] = float("nan")  # layer 1 sees 20 keys
    made = world.backend.plan(step_plan([Row(tokens(length + 1), [6, 2, 0, 1], length)], size))
    query, key = torch.ones(1, HEADS, DIM, dtype=world.dtype), torch.ones(1, KV_HEADS, DIM, dtype=world.dtype)
    assert bool(world.backend.forward(1, query, key, key, made).isfinite().all())


def test_padded_rows_of_a_captured_step_give_zero_and_write_where_nobody_reads() -> None:
    backend = FlashAttention(shape())
    world = World(backend, torch.bfloat16)
    world.step([(0, Row(tokens(30), [3]))])
    kept = [pool[:, : backend.num_blocks].clone() for pool in backend._pools]
    scratch = torch.full((2,), backend.scratch_slot)
    lengths, tables = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    query, key = torch.randn(2, HEADS, DIM).bfloat16(), torch.randn(2, KV_HEADS, DIM).bfloat16()
    output = backend.forward(0, query, key, key, FlashPlan(scratch, (Decodes(None, tables, lengths),)))
    assert output.tolist() == [[0.0] * (HEADS * DIM)] * 2
    assert all(torch.equal(old, pool[:, : backend.num_blocks]) for old, pool in zip(kept, backend._pools, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_on_either_backend_is_the_slow_way(world: World, seed: int) -> None:
    chance = random.Random(seed)
    size = world.backend.block_size
    lengths = [chance.randint(1, 70) for _ in range(5)]
    free = iter(chance.sample(range(world.backend.num_blocks), world.backend.num_blocks))
    tables = [[next(free) for _ in range(num_blocks_for(length, size))] for length in lengths]
    done = [0] * 5
    while unfinished := [i for i in range(5) if done[i] < lengths[i]]:
        rows = []
        for i in chance.sample(unfinished, chance.randint(1, len(unfinished))):
            stop = min(lengths[i], done[i] + chance.choice([1, 1, 2, 9, 40]))
            rows.append((i, Row(tokens(lengths[i]), tables[i], done[i], stop)))
            done[i] = stop
        world.step(rows)


@pytest.mark.parametrize(
    ("changes", "capability", "named"),
    [
        ({}, (7, 5), "compute capability 8.0"),
        ({"dtype": torch.float32}, (8, 0), "float32"),
        ({"head_dim": 264}, (8, 0), "264"),
        ({"head_dim": 20}, (8, 0), "20"),
        ({"block_size": 16}, (8, 0), "256"),
    ],
)
def test_what_flash_attn_cannot_do_is_said(
    changes: dict[str, object], capability: tuple[int, int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.models.attention_choice.has_flash_attn", lambda: True)
    obstacle = flash_obstacle(dataclasses.replace(shape(), **changes), capability)
    assert obstacle is not None
    assert named in obstacle
    assert flash_obstacle(shape(), (9, 0)) is None


def test_without_flash_attn_a_gpu_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.models.attention_choice.has_flash_attn", lambda: False)
    assert "pip install" in (flash_obstacle(shape(), (8, 0)) or "")


def test_a_cpu_gets_the_torch_backend() -> None:
    assert attention_for(shape()) is TorchAttention


@pytest.mark.parametrize(
    ("installed", "device", "dtype", "size"),
    [(True, "cuda:1", "bfloat16", 256), (True, "cuda:0", "float32", 16), (False, "cuda:0", "float16", 16), (True, "cpu", "bfloat16", 16)],
)
def test_blocks_are_as_large_as_attention_on_the_device_needs(
    installed: bool, device: str, dtype: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.config.has_flash_attn", lambda: installed)
    assert kv_block_size(0, device, dtype) == size
    assert kv_block_size(512, device, dtype) == 512
    for wrong in (-256, size + 8):
        with pytest.raises(ConfigError, match=f"multiple of {size} .* got {wrong}"):
            kv_block_size(wrong, device, dtype)
