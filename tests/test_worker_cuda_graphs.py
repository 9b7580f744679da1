"""Recorded decode steps on the CPU: the recorder is a fake that runs the step again, everything around it is the real thing."""

from __future__ import annotations

import dataclasses
import sys

import fake_flash_attn
import pytest
import torch
from fake_recorder import FakeRecorder
from step_plans import Row, num_blocks_for, step_plan
from tiny_model import build_decoder

from mmserve.models.attention import AttentionShape
from mmserve.models.decoder import Decoder
from mmserve.models.flash_attention import FlashAttention
from mmserve.plan import MediaSlice, StepPlan
from mmserve.shared_buffer import BufferSlice
from mmserve.worker.cuda_graphs import DecodeGraphs, row_buckets, width_buckets

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 256, 24


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("graphs")
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    build_decoder(directory, **shape, head_dim=8)
    return Decoder.load(directory, CPU, torch.bfloat16, computes_in=torch.bfloat16)  # as a GPU does


@pytest.fixture
def attention(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    return FlashAttention(AttentionShape((None, 40), 4, 2, 8, NUM_BLOCKS, BLOCK_SIZE, CPU, torch.bfloat16))


def graphs_of(decoder: Decoder, attention: FlashAttention, *, max_rows: int = 5, max_blocks: int = 6) -> tuple[DecodeGraphs, FakeRecorder]:
    graphs, recorder = DecodeGraphs(decoder, attention, max_rows=max_rows, max_blocks=max_blocks, num_axes=1), FakeRecorder()
    graphs.record(recorder)
    return graphs, recorder


@torch.inference_mode()
def eager(decoder: Decoder, attention: FlashAttention, plan: StepPlan) -> torch.Tensor:
    hidden = decoder.embed(torch.from_numpy(plan.token_ids).long())
    return decoder.forward(hidden, torch.from_numpy(plan.positions[0]).long(), attention, attention.plan(plan))


def sequences(attention: FlashAttention, decoder: Decoder, lengths: list[int]) -> list[Row]:
    """Prefilled up to their last token."""
    free = iter(range(NUM_BLOCKS - 1, -1, -1))
    rows = []
    for i, length in enumerate(lengths):
        ids = torch.randint(0, 424, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        rows.append(Row(ids, [next(free) for _ in range(num_blocks_for(length, BLOCK_SIZE))], length - 1))
    for row in rows:
        if row.start:
            eager(decoder, attention, step_plan([dataclasses.replace(row, start=0, stop=row.start)], BLOCK_SIZE))
    return rows


def test_buckets_cover_every_count_up_to_the_largest() -> None:
    assert row_buckets(128) == (1, 2, 4, 8, 16, 32, 64, 96, 128)
    assert row_buckets(5) == (1, 2, 4, 5)
    assert row_buckets(1) == (1,)
    assert row_buckets(32) == (1, 2, 4, 8, 16, 32)
    assert width_buckets(512) == (4, 16, 64, 256, 512)
    assert width_buckets(3) == (3,)


def test_the_largest_step_is_recorded_first(decoder: Decoder, attention: FlashAttention) -> None:
    graphs, recorder = graphs_of(decoder, attention)
    assert list(graphs._replays) == [(rows, width) for rows in (5, 4, 2, 1) for width in (6, 4)]
    assert recorder.recorded == list(range(8))


@pytest.mark.parametrize("lengths", [[1], [30, 2], [257, 3, 40], [5, 600, 256, 255, 1025]])
def test_a_replayed_step_is_the_eager_one(decoder: Decoder, attention: FlashAttention, lengths: list[int]) -> None:
    graphs, recorder = graphs_of(decoder, attention)
    rows = sequences(attention, decoder, lengths)
    plan = step_plan(rows, BLOCK_SIZE)
    assert graphs.can_run(plan)
    expected = eager(decoder, attention, plan)
    pools = [pool[:, :NUM_BLOCKS].clone() for pool in attention._pools]
    torch.testing.assert_close(graphs.run(plan), expected, rtol=2e-2, atol=2e-2)
    # Padding wrote to no block of anyone's; what the rows wrote is what they wrote before.
    for before, pool in zip(pools, attention._pools, strict=True):
        torch.testing.assert_close(pool[:, :NUM_BLOCKS], before, rtol=2e-2, atol=2e-2)
    assert len(recorder.replayed) == 1


def test_a_large_step_leaves_nothing_behind_for_a_small_one(decoder: Decoder, attention: FlashAttention) -> None:
    graphs, recorder = graphs_of(decoder, attention)
    rows = sequences(attention, decoder, [300, 20, 700, 9, 33])
    graphs.run(step_plan(rows, BLOCK_SIZE))
    small = step_plan(rows[1:4:2] + rows[4:], BLOCK_SIZE)  # three rows in a bucket of four, in other places than before
    expected = eager(decoder, attention, small)
    kept = [pool[:, :NUM_BLOCKS].clone() for pool in attention._pools]
    torch.testing.assert_close(graphs.run(small), expected, rtol=2e-2, atol=2e-2)
    for before, pool in zip(kept, attention._pools, strict=True):
        torch.testing.assert_close(pool[:, :NUM_BLOCKS], before, rtol=2e-2, atol=2e-2)
    assert recorder.replayed == [1, 3]  # (5, 4), then (4, 4)


def test_what_was_not_recorded_runs_eagerly(decoder: Decoder, attention: FlashAttention) -> None:
    graphs, _ = graphs_of(decoder, attention, max_rows=2, max_blocks=2)
    ids = list(range(30))
    assert graphs.can_run(step_plan([Row(ids, [1], 29), Row(ids, [2], 29)], BLOCK_SIZE))
    assert not graphs.can_run(step_plan([Row(ids, [1], 28)], BLOCK_SIZE))
    assert not graphs.can_run(step_plan([Row(ids, [i], 29) for i in range(3)], BLOCK_SIZE))
    assert not graphs.can_run(step_plan([Row(ids, [1, 2, 3], 29)], BLOCK_SIZE))
    picture = MediaSlice(b"k", BufferSlice(0, (1, 32), "float32"), 0, 1, 0)
    assert not graphs.can_run(step_plan([Row(ids, [1], 29)], BLOCK_SIZE, media=[picture]))
