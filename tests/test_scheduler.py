"""One step after the other: what is in a plan, and how answers end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kv_world import EOS, media_key, sequence
from scheduler_desk import Desk, greedy, output

from mmserve.plan import RowSampling, SampledToken, StepFailed, StepResult
from mmserve.request import FinishReason, SamplingParams
from mmserve.scheduler.cost_model import CostModel, shape_of
from mmserve.scheduler.scheduler import TokenUpdate
from mmserve.scheduler.sequence import Status

BLOCK_SIZES = pytest.mark.parametrize("block_size", [16, 256])
CAT = media_key("cat")


def test_a_plan_carries_everything_one_pass_needs():
    desk = Desk(block_size=16)
    desk.media.encode(CAT)
    first = sequence(1, 3)
    second = sequence(2, 2, ("cat", 18), 1, sampling=greedy(temperature=0.7, top_p=0.9, logprobs=2), seed=99)
    desk.add(first)
    desk.step()
    desk.add(second)
    plan = desk.plan()
    assert plan.step_id == 2
    assert plan.seq_ids == (1, 2)
    assert plan.token_ids.tolist() == [first.token_ids[3], 1, 2, *([0] * 18), 21]
    assert plan.positions.tolist() == [[3, *range(21)]]
    assert plan.slot_mapping.tolist() == [3, *range(16, 37)]
    assert plan.query_starts.tolist() == [0, 1, 22]
    assert plan.context_lens.tolist() == [4, 21]
    assert plan.block_tables.tolist() == [[0, 0], [1, 2]]
    assert plan.wants_token.tolist() == [True, True]
    assert plan.sampling == (RowSampling(position=3), RowSampling(temperature=0.7, top_p=0.9, seed=99, position=21, logprobs=2))
    (piece,) = plan.media
    assert (piece.key, piece.rows, piece.row_start, piece.num_rows, piece.token_start) == (CAT, desk.media.rows_of(CAT), 0, 18, 3)
    arrays = (plan.token_ids, plan.positions, plan.slot_mapping, plan.query_starts, plan.context_lens, plan.block_tables)
    assert {each.dtype for each in arrays} == {np.dtype(np.int32)}
    assert plan.wants_token.dtype == np.bool_


def test_a_finished_plan_does_not_change_when_sequences_do():
    desk = Desk()
    each = sequence(1, 20)
    desk.add(each)
    plan = desk.plan()
    before = plan.block_tables.copy(), plan.token_ids.copy()
    desk.scheduler.abort(1)
    each.token_ids[0] = 55
    assert (plan.block_tables.tolist(), plan.token_ids.tolist()) == (before[0].tolist(), before[1].tolist())


@BLOCK_SIZES
def test_decodes_come_first_and_prefill_takes_what_is_left_of_the_budget(block_size: int):
    desk = Desk(block_size=block_size, max_num_batched_tokens=32)
    desk.add(sequence(1, 10), sequence(2, 12))
    assert desk.step() == [(1, 10), (2, 12)]
    desk.add(sequence(3, 70, "third"))
    assert desk.step() == [(1, 1), (2, 1), (3, 30)]
    assert desk.step() == [(1, 1), (2, 1), (3, 30)]
    assert desk.step() == [(1, 1), (2, 1), (3, 15)]
    assert desk.step() == [(3, 1)]


def test_only_the_step_that_reaches_the_last_token_asks_for_one():
    desk = Desk(max_num_batched_tokens=16)
    desk.add(sequence(1, 40))
    wants = []
    for _ in range(4):
        plan = desk.plan()
        wants.append((plan.wants_token.tolist(), plan.sampling[0] is not None))
        desk.land(plan)
    assert wants == [([False], False), ([False], False), ([True], True), ([True], True)]


def test_no_more_sequences_run_than_allowed():
    desk = Desk(max_num_seqs=2)
    desk.add(*(sequence(i, 5, str(i)) for i in range(4)))
    assert [seq_id for seq_id, _ in desk.step()] == [0, 1]
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (2, 2)
    desk.run()
    assert all(each.finish_reason is FinishReason.LENGTH for each in desk.truth.values())


def test_no_more_sequences_run_than_a_step_has_tokens():
    desk = Desk(max_num_seqs=8, max_num_batched_tokens=3)
    desk.add(*(sequence(i, str(i)) for i in range(6)))
    assert desk.step() == [(0, 1), (1, 1), (2, 1)]
    assert desk.scheduler.num_running == 3  # whoever runs gets its token in every step
    desk.add(sequence(9, "9", priority=-1))
    desk.run()
    assert all(each.num_output == 4 for each in desk.truth.values())


def test_nothing_to_do_is_no_plan():
    assert Desk().scheduler.schedule(0.0) is None


def test_an_end_token_ends_with_stop_and_is_reported():
    desk = Desk()
    each = sequence(1, 5, sampling=greedy(max_tokens=50), eos_token_ids=(EOS,))
    desk.add(each)
    plan = desk.plan()
    (update,) = desk.scheduler.apply(StepResult(1, (SampledToken(EOS),)), 0.0)
    assert update == TokenUpdate(each, SampledToken(EOS), FinishReason.STOP)
    assert (each.status, each.finish_reason, output(each)) == (Status.FINISHED, FinishReason.STOP, [EOS])
    assert desk.kv.usage == 0
    assert plan.sampling[0] is not None
    assert plan.sampling[0].banned_ids == ()


@pytest.mark.parametrize(
    ("sampling", "drawn", "reasons"),
    [
        (greedy(max_tokens=2), [5, 6], [None, FinishReason.LENGTH]),
        (greedy(max_tokens=2), [5, EOS], [None, FinishReason.STOP]),
        (greedy(max_tokens=1), [5], [FinishReason.LENGTH]),
        (greedy(max_tokens=None), [5, 6, 7], [None, None, FinishReason.LENGTH]),
        (greedy(stop_token_ids=(7,)), [5, 7], [None, FinishReason.STOP]),
        (greedy(max_tokens=2, ignore_eos=True), [EOS, EOS], [None, FinishReason.LENGTH]),
        (greedy(ignore_eos=True, stop_token_ids=(7,)), [EOS, 7], [None, FinishReason.STOP]),
        (greedy(min_tokens=1), [5, EOS], [None, FinishReason.STOP]),
        (greedy(min_tokens=1), [EOS, EOS], [None, FinishReason.STOP]),  # whatever a worker makes of banned_ids
    ],
)
def test_how_an_answer_ends(sampling: SamplingParams, drawn: list[int], reasons: list[FinishReason | None]):
    desk = Desk()
    desk.add(sequence(1, 5, sampling=sampling, eos_token_ids=(EOS,), max_total_tokens=8))
    seen = []
    for token_id in drawn:
        plan = desk.plan()
        (update,) = desk.scheduler.apply(StepResult(plan.step_id, (SampledToken(token_id),)), 0.0)
        seen.append(update.finish_reason)
    assert seen == reasons
    assert desk.scheduler.schedule(0.0) is None


def test_end_tokens_are_banned_until_min_tokens_are_out():
    desk = Desk()
    desk.add(sequence(1, 5, sampling=greedy(min_tokens=2, max_tokens=9, stop_token_ids=(7,)), eos_token_ids=(EOS,)))
    banned = []
    for _ in range(3):
        plan = desk.plan()
        assert plan.sampling[0] is not None
        banned.append(plan.sampling[0].banned_ids)
        desk.scheduler.apply(StepResult(plan.step_id, (SampledToken(5),)), 0.0)
    assert banned == [(7, EOS), (7, EOS), ()]


def test_penalties_see_the_prompt_without_its_pictures_and_every_token_drawn_so_far():
    desk = Desk()
    desk.media.encode(CAT)
    desk.add(sequence(1, 2, ("cat", 5), 1, sampling=greedy(repetition_penalty=1.2, logit_bias={4: 1.5})))
    for drawn in ([], [5], [5, 5]):
        plan = desk.plan()
        how = plan.sampling[0]
        assert how is not None
        assert how.prompt_ids is not None
        assert how.output_ids is not None
        assert (how.prompt_ids.tolist(), how.output_ids.tolist(), how.logit_bias) == ([1, 2, 8], drawn, {4: 1.5})
        desk.scheduler.apply(StepResult(plan.step_id, (SampledToken(5),)), 0.0)


def test_a_stop_string_found_outside_ends_a_sequence_also_while_it_is_computed():
    desk = Desk()
    desk.add(sequence(1, 20), sequence(2, 20, "other"))
    desk.step()
    plan = desk.plan()
    desk.scheduler.finish(1, FinishReason.STOP)
    desk.scheduler.check()
    assert [update.sequence.seq_id for update in desk.land(plan)] == [2]
    assert desk.truth[1].finish_reason is FinishReason.STOP
    assert desk.truth[1].num_output == 1


def test_blocks_of_a_client_that_left_are_free_at_once():
    desk = Desk(num_blocks=4)
    desk.add(sequence(1, 33))
    plan = desk.plan()
    assert desk.kv.num_available == 1
    desk.scheduler.abort(1)
    desk.scheduler.check()
    assert desk.kv.num_available == 4
    assert desk.land(plan) == []


def test_aborting_twice_or_somebody_unknown_is_nothing():
    desk = Desk()
    desk.add(sequence(1, 5))
    for seq_id in (1, 1, 77):
        desk.scheduler.abort(seq_id)
        desk.scheduler.check()
    assert desk.scheduler.schedule(0.0) is None


def test_five_hundred_waiting_sequences_can_leave_in_any_order():
    desk = Desk(max_num_seqs=1)
    desk.add(*(sequence(i, 3, arrival_s=float(i % 7), priority=i % 3) for i in range(500)))
    for i in range(500):
        desk.scheduler.abort(i * 211 % 500)
    desk.scheduler.check()
    assert desk.scheduler.num_waiting == 0


def test_a_result_of_an_earlier_step_is_not_taken_for_the_one_in_flight():
    """A hand-made slip, any result for the step in flight, passed all tests: stale results had only come between steps."""
    desk = Desk(block_size=16)
    each = sequence(1, 3)
    desk.add(each)
    first = desk.plan()
    desk.land(first)
    second = desk.plan()
    before = output(each)
    assert desk.scheduler.apply(StepResult(first.step_id, (SampledToken(7),)), 0.0) == []
    assert desk.scheduler.step_failed(StepFailed(first.step_id, "out_of_memory")) == []
    assert (output(each), desk.scheduler.num_late_results) == (before, 2)
    desk.land(second)
    assert len(output(each)) == 2


def test_a_result_that_comes_late_is_ignored():
    desk = Desk()
    desk.add(sequence(1, 5))
    plan = desk.plan()
    result = desk.worker.run(plan, desk.truth)
    desk.scheduler.apply(result, 0.0)
    before = output(desk.truth[1])
    assert desk.scheduler.apply(result, 0.0) == []
    assert desk.scheduler.step_failed(StepFailed(plan.step_id, "out_of_memory")) == []
    assert (output(desk.truth[1]), desk.scheduler.num_late_results) == (before, 2)


def test_times_of_first_step_and_first_token_are_kept():
    desk = Desk(max_num_batched_tokens=16)
    each = sequence(1, 20)
    desk.add(each)
    for desk.now_s in (5.0, 6.0, 7.0):
        desk.step()
    assert (each.first_step_s, each.first_token_s) == (5.0, 6.0)


def test_nobody_knows_how_long_a_step_takes_behind_one_that_was_never_measured():
    """The end of a long prompt, planned while its first piece was computed, was given 5 s: less than that piece then took."""
    costs = CostModel()
    costs.observe(shape_of([(0, 100)]), 0.01)
    desk = Desk(max_num_batched_tokens=256, costs=costs)
    desk.add(sequence(1, 300))
    assert len(desk.plan().token_ids) == 256
    assert desk.scheduler.slowest_s == math.inf
    assert len(desk.plan().token_ids) == 44
    assert desk.scheduler.slowest_s == math.inf
