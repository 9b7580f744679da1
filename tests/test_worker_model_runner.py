"""Steps of a decoder worker: media rows, sampling, failures, and what survives them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import fake_flash_attn
import numpy as np
import pytest
import torch
from fake_recorder import FakeRecorder
from step_plans import Row, step_plan
from tiny_model import build_decoder
from transformers import LlamaForCausalLM

from mmserve.models.flash_attention import FlashAttention
from mmserve.models.linear import compute_dtype
from mmserve.plan import DecoderWorkerSpec, MediaSlice, RowSampling, StepFailed, StepPlan, StepResult
from mmserve.shared_buffer import BufferSlice, SharedBuffer
from mmserve.worker.kv_budget import RESERVE_BYTES, gpu_budget
from mmserve.worker.model_runner import ModelRunner

HIDDEN = 64
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = list(range(10, 40))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runner")
    torch.manual_seed(5)
    build_decoder(path, **SHAPE)
    return path


@pytest.fixture
def buffer() -> SharedBuffer:
    return SharedBuffer(2**20)


@pytest.fixture(params=[16, 256])
def runner(request: pytest.FixtureRequest, directory: Path, buffer: SharedBuffer) -> ModelRunner:
    runner = ModelRunner(spec(directory, block_size=request.param), buffer.memory)
    runner.warm_up()
    return runner


def spec(directory: Path, **changes: object) -> DecoderWorkerSpec:
    plain = DecoderWorkerSpec("small", directory, "cpu", "float32", 1, 16, 2048, 8, 512, 8 * 2**20, 0.9)
    return dataclasses.replace(plain, **changes)


def run(runner: ModelRunner, plan: StepPlan) -> StepResult:
    result = runner.run(plan)
    assert isinstance(result, StepResult)
    return result


def tokens(result: StepResult) -> list[int | None]:
    return [None if token is None else token.token_id for token in result.tokens]


def generate(
    runner: ModelRunner, prompt: list[int], count: int, sampling: RowSampling | None = None, blocks: tuple[int, ...] = (2, 1, 5)
) -> list[int]:
    """The slow way: one row, one step a token."""
    sampling = sampling or RowSampling()
    ids, start = list(prompt), 0
    for _ in range(count):
        row = Row(ids, blocks, start, sampling=sampling._replace(position=len(ids)))
        start = len(ids)
        ids.append(tokens(run(runner, step_plan([row], runner.ready.block_size)))[0])  # type: ignore[arg-type]
    return ids[len(prompt) :]


@torch.inference_mode()
def oracle(directory: Path, embeddings: torch.Tensor) -> torch.Tensor:
    """Logits of the last token of a sequence given as embeddings [T, H]."""
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(inputs_embeds=embeddings[None]).logits[0, -1]


def word_rows(directory: Path, ids: list[int]) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.get_input_embeddings()(torch.tensor(ids)).detach()


def write_rows(buffer: SharedBuffer, rows: np.ndarray) -> BufferSlice:
    where = buffer.allocate(rows.shape, "float32")
    buffer.array(where)[:] = rows
    return where


def test_greedy_decoding_gives_the_tokens_of_transformers(runner: ModelRunner, directory: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 30:]
    assert generate(runner, PROMPT, 12) == expected.tolist()


def test_rows_without_a_wanted_token_give_none(runner: ModelRunner) -> None:
    plan = step_plan([Row(PROMPT, [3, 4], 0, 20, sampling=None), Row(PROMPT, [1, 2])], runner.ready.block_size, step_id=77)
    result = run(runner, plan)
    assert result.step_id == 77
    assert result.tokens[0] is None
    assert result.tokens[1] is not None
    assert result.failed_rows == ()


def test_media_rows_stand_where_the_plan_puts_them(runner: ModelRunner, directory: Path, buffer: SharedBuffer) -> None:
    rows = np.random.default_rng(0).standard_normal((12, HIDDEN)).astype(np.float32)
    where = write_rows(buffer, rows)
    words = word_rows(directory, PROMPT)
    expected = oracle(directory, torch.cat([words[:5], torch.from_numpy(rows), words[17:]]))
    # Ids under media are never looked at, not even when no vocabulary has them.
    ids = PROMPT[:5] + [2**31 - 1] * 12 + PROMPT[17:]
    plan = step_plan([Row([7], [9]), Row(ids, [3, 4])], runner.ready.block_size, media=[MediaSlice(b"k", where, 0, 12, 6)])
    assert tokens(run(runner, plan))[1] == int(expected.argmax())


def test_a_picture_cut_by_chunks_is_the_same_picture(runner: ModelRunner, directory: Path, buffer: SharedBuffer) -> None:
    rows = np.random.default_rng(1).standard_normal((20, HIDDEN)).astype(np.float32)
    where = write_rows(buffer, rows)
    words = word_rows(directory, PROMPT)
    expected = oracle(directory, torch.cat([words[:5], torch.from_numpy(rows), words[25:]]))
    block_size = runner.ready.block_size
    for start, stop, media in (
        (0, 9, MediaSlice(b"k", where, 0, 4, 5)),
        (9, 18, MediaSlice(b"k", where, 4, 9, 0)),
        (18, 30, MediaSlice(b"k", where, 13, 7, 0)),
    ):
        result = run(runner, step_plan([Row(PROMPT, [3, 4], start, stop)], block_size, media=[media]))
    assert tokens(result) == [int(expected.argmax())]


def test_bfloat16_rows_are_read_as_such(runner: ModelRunner, directory: Path, buffer: SharedBuffer) -> None:
    rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    where = buffer.allocate((4, HIDDEN), "bfloat16")
    buffer.array(where)[:] = rows.view(torch.uint16).numpy()
    words = word_rows(directory, PROMPT)
    expected = oracle(directory, torch.cat([rows.float(), words[4:]]))
    plan = step_plan([Row(PROMPT, [3, 4])], runner.ready.block_size, media=[MediaSlice(b"k", where, 0, 4, 0)])
    assert tokens(run(runner, plan)) == [int(expected.argmax())]


def test_a_row_that_is_not_finite_fails_alone_and_leaves_nothing_behind(runner: ModelRunner, buffer: SharedBuffer) -> None:
    block_size = runner.ready.block_size
    expected = tokens(run(runner, step_plan([Row(PROMPT, [1, 2])], block_size)))
    poison = np.zeros((3, HIDDEN), np.float32)
    poison[1, 5] = np.nan
    media = [MediaSlice(b"k", write_rows(buffer, poison), 0, 3, 4)]
    # Block 0 pads every table: the poisoned row owns it.
    rows = [Row(PROMPT, [0, 3]), Row(PROMPT, [1, 2]), Row(PROMPT, [4, 5], 0, 10, sampling=None)]
    result = run(runner, step_plan(rows, block_size, media=media))
    assert result.failed_rows == (0,)
    assert tokens(result) == [None, expected[0], None]
    # Its blocks serve another sequence afterwards, and short contexts read past them.
    assert tokens(run(runner, step_plan([Row(PROMPT, [0, 3])], block_size))) == expected
    assert generate(runner, PROMPT[:3], 4, blocks=(0, 3)) == generate(runner, PROMPT[:3], 4, blocks=(6, 7))


def test_a_bad_row_is_reported_even_when_it_wants_no_token(runner: ModelRunner, buffer: SharedBuffer) -> None:
    media = [MediaSlice(b"k", write_rows(buffer, np.full((1, HIDDEN), np.inf, np.float32)), 0, 1, 2)]
    rows = [Row(PROMPT, [4, 5], 0, 10, sampling=None), Row(PROMPT, [1, 2])]
    result = run(runner, step_plan(rows, runner.ready.block_size, media=media))
    assert result.failed_rows == (0,)
    assert result.tokens[1] is not None


def test_a_replayed_sequence_draws_the_same_tokens_alone_and_in_company(runner: ModelRunner) -> None:
    sampling = RowSampling(temperature=1.0, seed=99, top_p=0.95)
    first = generate(runner, PROMPT, 8, sampling)
    assert generate(runner, PROMPT, 8, sampling, blocks=(7, 6, 4)) == first
    # Recomputed up to token 5, with others in the batch, it goes on with token 5.
    replayed = PROMPT + first[:5]
    row = Row(replayed, [2, 1, 5], sampling=sampling._replace(position=len(replayed)))
    plan = step_plan([Row([1, 2], [8]), row, Row(PROMPT, [9, 10])], runner.ready.block_size)
    assert tokens(run(runner, plan))[1] == first[5]
    assert len(set(first)) > 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_running_out_of_memory_is_a_result_and_the_worker_goes_on(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plan = step_plan([Row(PROMPT, [1, 2])], runner.ready.block_size, step_id=5)
    expected = tokens(run(runner, plan))
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise error

        patch.setattr(runner._decoder, "logits", fail)
        assert runner.run(plan) == StepFailed(5, "out_of_memory")
    assert tokens(run(runner, plan)) == expected


def test_any_other_fault_ends_the_worker(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runner._decoder, "logits", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.run(step_plan([Row(PROMPT, [1, 2])], runner.ready.block_size))


def test_ready_tells_what_fits(directory: Path, buffer: SharedBuffer) -> None:
    # 2 layers x (key + value) x 2 heads x 16 elements x 4 bytes = 512 bytes a token
    small = ModelRunner(spec(directory, kv_cache_memory_bytes=512 * 16 * 10), buffer.memory).ready
    assert (small.num_blocks, small.block_size, small.max_model_len, small.vocab_size, small.hidden_size) == (10, 16, 2048, 424, 64)
    half = ModelRunner(spec(directory, kv_cache_memory_bytes=512 * 16 * 10, dtype="bfloat16"), buffer.memory).ready
    assert half.num_blocks == 10 * 4 // compute_dtype(torch.device("cpu"), torch.bfloat16).itemsize
    # No more than all sequences at full length: 8 of 100 tokens in 7 blocks each
    plenty = ModelRunner(spec(directory, max_model_len=100, kv_cache_memory_bytes=2**30), buffer.memory).ready
    assert (plenty.num_blocks, plenty.max_model_len) == (56, 100)
    with pytest.raises(ValueError, match="no room for two blocks"):
        ModelRunner(spec(directory, kv_cache_memory_bytes=512 * 16), buffer.memory)


def test_a_gpus_budget_is_what_is_free_less_what_others_and_a_step_need() -> None:
    gib = 2**30
    assert gpu_budget(free=60 * gib, total=80 * gib, utilization=0.75, activation_bytes=2 * gib) == 38 * gib - RESERVE_BYTES


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 70, "max_model_len": 30}])
def test_the_largest_step_runs_in_the_blocks_of_the_trial(directory: Path, buffer: SharedBuffer, limits: dict[str, int]) -> None:
    runner = ModelRunner(spec(directory, **limits, max_num_seqs=600), buffer.memory)
    assert sum(runner._trial_counts()) == limits["max_num_batched_tokens"]
    assert max(runner._trial_counts()) <= runner.ready.max_model_len
    assert runner.ready.num_blocks >= runner._num_trial_blocks()
    runner.run_largest_step()


def test_recorded_steps_give_the_tokens_of_eager_ones(directory: Path, buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setattr("mmserve.worker.model_runner.attention_for", lambda shape: FlashAttention)
    monkeypatch.setattr("mmserve.models.decoder.compute_dtype", lambda device, dtype: dtype)  # as on a GPU
    plain = spec(directory, block_size=256, dtype="bfloat16", kv_cache_memory_bytes=8 * 2**20, max_num_seqs=4)
    eager, recorded = ModelRunner(plain, buffer.memory), ModelRunner(plain, buffer.memory)
    recorder = FakeRecorder()
    recorded.record_graphs(recorder)
    sampling = RowSampling(temperature=0.8, seed=3)
    assert generate(recorded, PROMPT, 8, sampling) == generate(eager, PROMPT, 8, sampling)
    assert len(recorder.replayed) == 7  # all but the prefill


def test_a_warm_up_that_is_not_finite_refuses_to_start(directory: Path, buffer: SharedBuffer) -> None:
    runner = ModelRunner(spec(directory), buffer.memory)
    runner._decoder._norm._weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="warm-up"):
        runner.warm_up()


def test_positions_of_several_axes_are_refused(runner: ModelRunner) -> None:
    plan = step_plan([Row(PROMPT, [1, 2])], runner.ready.block_size)
    with pytest.raises(ValueError, match="3 position axes for a decoder of 1"):
        runner.run(dataclasses.replace(plan, positions=np.repeat(plan.positions, 3, axis=0)))
