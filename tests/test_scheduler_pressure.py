"""Who goes first, who gives way, and what happens when memory or the worker is gone."""

from __future__ import annotations

import pytest
from kv_world import PLACEHOLDER, answer_alone, media_key, sequence
from scheduler_desk import Desk, greedy, output, rows_of

from mmserve.plan import SampledToken, StepResult
from mmserve.request import FinishReason
from mmserve.scheduler.scheduler import TokenUpdate
from mmserve.scheduler.sequence import Status

BLOCK_SIZES = pytest.mark.parametrize("block_size", [16, 256])
CAT = media_key("cat")


def test_priority_then_cost_then_age_decides_who_is_next():
    desk = Desk(max_num_seqs=1)
    desk.add(
        sequence(1, 200, arrival_s=0.0),
        sequence(2, 5, "b", arrival_s=0.1),
        sequence(3, 100, "c", arrival_s=0.0, priority=-1),
        sequence(4, 5, "d", arrival_s=0.5),
    )
    served = []
    while desk.scheduler.num_running or desk.scheduler.num_waiting:
        served += [seq_id for seq_id, _ in desk.step() if seq_id not in served]
    assert served == [3, 2, 1, 4]


def test_a_large_request_is_served_under_endless_small_ones():
    desk = Desk(max_num_seqs=1, num_blocks=80)
    desk.add(sequence(0, 1000, arrival_s=0.0))
    for i in range(1, 200):
        desk.now_s = i * 0.1
        desk.add(sequence(i, 5, str(i), arrival_s=desk.now_s, sampling=greedy(max_tokens=1)))
        desk.step()
        if desk.truth[0].first_step_s is not None:
            break
    assert desk.truth[0].first_step_s == pytest.approx(1.0)  # it costs some 92 ms, and ages by 100 a second


def test_who_lacks_blocks_is_not_overtaken_by_who_needs_fewer():
    desk = Desk(num_blocks=10)
    desk.add(sequence(1, 100))
    desk.step()
    desk.add(sequence(2, "large", 80, arrival_s=2.0), sequence(3, "small", 5, arrival_s=9.0))
    assert desk.step() == [(1, 1)]
    assert desk.scheduler.num_waiting == 2
    desk.run()
    assert desk.truth[2].first_step_s is not None


@BLOCK_SIZES
def test_under_pressure_the_lowest_priority_is_preempted_youngest_first_and_resumes_unnoticed(block_size: int):
    desk = Desk(num_blocks=8, block_size=block_size, max_num_batched_tokens=2048)
    size = block_size
    long = greedy(max_tokens=size + 8)
    crowd = [
        sequence(1, "a", 2 * size - 5, sampling=long, priority=1),
        sequence(2, "b", size - 5, sampling=long, priority=0),
        sequence(3, "c", size - 5, sampling=long, priority=1),
    ]
    expected = [answer_alone(each) for each in crowd]
    desk.add(*crowd)
    desk.run()
    assert [output(each) for each in crowd] == expected
    assert [each.num_preemptions for each in crowd] == [0, 0, 1]
    assert desk.scheduler.num_preemptions == 1
    assert desk.kv.usage == 0


def test_one_sequence_may_fill_the_cache_to_the_last_slot():
    desk = Desk(num_blocks=3)
    each = sequence(1, 20, sampling=greedy(max_tokens=None))
    desk.add(each)
    desk.run()
    assert (each.num_tokens, each.finish_reason, each.num_preemptions) == (48, FinishReason.LENGTH, 0)


def test_a_preempted_stream_goes_before_those_that_have_not_begun():
    desk = Desk(num_blocks=5)
    first, second = (sequence(i, str(i), 30, sampling=greedy(max_tokens=30)) for i in (1, 2))
    desk.add(first, second)
    desk.step()
    desk.add(sequence(3, 3, "cheap", arrival_s=0.0))
    while not second.num_preemptions:
        desk.step()
    assert second.num_output > 0
    order = []
    while desk.scheduler.num_running or desk.scheduler.num_waiting:
        order += [seq_id for seq_id, _ in desk.step()]
    assert order.index(2) < order.index(3)


@BLOCK_SIZES
def test_a_step_that_ran_out_of_memory_is_tried_again_smaller_and_nothing_is_lost(block_size: int):
    desk = Desk(block_size=block_size, max_num_batched_tokens=128)
    crowd = [sequence(i, str(i), 60) for i in range(1, 4)]
    expected = [answer_alone(each) for each in crowd]
    desk.add(*crowd)
    plan = desk.plan()
    assert rows_of(plan) == [(1, 61), (2, 61), (3, 6)]
    assert desk.fail(plan) == []
    assert crowd[2].num_preemptions == 1
    assert desk.step() == [(1, 61), (2, 3)]
    desk.run()
    assert [output(each) for each in crowd] == expected
    assert desk.kv.usage == 0


def test_no_more_sequences_stay_than_the_smaller_step_has_tokens():
    desk = Desk()
    desk.add(*(sequence(i, str(i), 5) for i in range(6)))
    desk.step()
    desk.fail(desk.plan())
    assert desk.scheduler.num_running == 3
    assert desk.step() == [(0, 1), (1, 1), (2, 1)]
    desk.run()
    assert all(each.finish_reason is FinishReason.LENGTH for each in desk.truth.values())


def test_a_failed_step_spoils_the_copies_it_was_to_make():
    desk = Desk(block_size=256)
    desk.add(sequence(1, 100))
    desk.run()
    again = sequence(2, 96, "and more")
    expected = answer_alone(again)
    desk.add(again)
    plan = desk.plan()
    assert [copy.num_tokens for copy in plan.copies] == [96]
    desk.fail(plan)
    assert again.status is Status.WAITING
    desk.run()
    assert output(again) == expected


def test_a_step_of_one_token_that_does_not_fit_is_the_end_of_that_sequence_only():
    desk = Desk()
    each = sequence(1, 5)
    desk.add(each)
    sizes, updates = [], []
    while not updates:
        plan = desk.plan()
        sizes.append(len(plan.token_ids))
        updates = desk.fail(plan)
    assert sizes == [5, 2, 1]
    assert updates == [TokenUpdate(each, None, FinishReason.ERROR, "overloaded")]
    desk.add(sequence(2, 5))
    desk.run()
    assert desk.truth[2].finish_reason is FinishReason.LENGTH


def test_steps_grow_back_after_they_have_fitted_for_a_while():
    desk = Desk(num_blocks=80, max_num_batched_tokens=64)
    desk.add(sequence(1, 1000, sampling=greedy(max_tokens=1)))
    desk.fail(desk.plan())
    sizes = [tokens for _ in range(32) for _, tokens in desk.step()]
    assert sizes == [32] * 31 + [8]
    desk.add(sequence(2, "x", 500, sampling=greedy(max_tokens=1)))
    assert desk.step() == [(2, 64)]


@BLOCK_SIZES
def test_after_a_dead_worker_everybody_goes_on_where_they_were(block_size: int):
    desk = Desk(block_size=block_size)
    aboard, waiting = sequence(1, 40), sequence(2, ("cat", 20), 5)
    expected = answer_alone(aboard)
    desk.add(aboard, waiting)
    desk.step()
    desk.step()
    plan = desk.plan()
    orphans = desk.scheduler.evacuate()
    desk.scheduler.check()
    assert orphans == [aboard, waiting]
    assert [(each.num_computed, each.num_output, each.num_worker_deaths, each.status) for each in orphans] == [
        (0, 2, 1, Status.WAITING),
        (0, 0, 0, Status.WAITING),
    ]
    assert desk.scheduler.apply(StepResult(plan.step_id, (SampledToken(3),)), 0.0) == []
    assert desk.scheduler.evacuate() == []
    assert desk.kv.num_available == 40
    other = Desk(block_size=block_size)
    other.add(*orphans)
    assert other.step() == [(1, 42)]
    other.run()
    assert output(aboard) == expected
    other.media.encode(CAT)
    other.run()
    assert waiting.finish_reason is FinishReason.LENGTH


def test_a_placeholder_never_reaches_a_worker():
    desk = Desk()
    desk.media.encode(CAT)
    desk.add(sequence(1, 5, ("cat", 20), 5))
    plan = desk.plan()
    assert PLACEHOLDER in desk.truth[1].token_ids
    assert PLACEHOLDER not in plan.token_ids


def test_who_begins_counts_once_for_how_fast_the_queue_drains():
    desk = Desk(num_blocks=5)
    desk.add(*(sequence(i, str(i), 30, sampling=greedy(max_tokens=30)) for i in (1, 2)))
    desk.now_s = 10.0
    desk.run()
    assert desk.scheduler.num_preemptions > 0
    assert len(desk.records.drain._recent) == 2


def test_what_is_pending_is_the_time_everybody_still_needs():
    desk = Desk(max_num_batched_tokens=100)
    costs = desk.records.costs
    seen = [desk.scheduler.pending_ms]
    desk.add(sequence(1, 150), sequence(2, "other", 30))
    seen.append(desk.scheduler.pending_ms)
    plan = desk.plan()
    assert desk.scheduler.pending_ms == pytest.approx(seen[-1])
    desk.land(plan)
    seen.append(desk.scheduler.pending_ms)
    desk.scheduler.abort(2)
    seen.append(desk.scheduler.pending_ms)
    rest = costs.row_ms(100, 150)
    assert seen == pytest.approx([0.0, costs.row_ms(0, 150) + costs.row_ms(0, 35), rest + costs.row_ms(0, 35), rest])
