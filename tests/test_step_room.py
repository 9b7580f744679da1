"""How much prefill goes beside running answers: what the time per token leaves, but always something."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_world import FakeMedia, sequence
from scheduler_desk import Desk, greedy, stopwatch

from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.scheduler.cost_model import PRIOR, Coefficients, CostModel, shape_of
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import Scheduler
from mmserve.scheduler.step_budget import PREFILL_FLOOR, PrefillRoom

ROUND = Coefficients(step=10.0, row=1.0, token=0.125, pair=1e-9, context=1e-9)
LONG = greedy(max_tokens=200)


def beside_a_decode(**fields: float) -> list[tuple[int, int]]:
    """A step with one running answer in it when a long prompt has come, as (seq_id, number of tokens)."""
    desk = Desk(num_blocks=200, costs=CostModel(ROUND), **fields)  # type: ignore[arg-type]
    desk.add(sequence(1, 20, sampling=LONG))
    desk.step()
    desk.add(sequence(2, "long", 2000))
    return desk.step()


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({"tpot_target_ms": 35.0, "max_num_batched_tokens": 1024}, 177),  # (0.98 * 35 - 10 - 1.125 - 1) / 0.125
        ({"tpot_target_ms": 35.0, "max_num_batched_tokens": 100}, 99),
        ({"tpot_target_ms": 11.0, "max_num_batched_tokens": 1024}, PREFILL_FLOOR),
        ({"tpot_target_ms": 1.0, "max_num_batched_tokens": 1024}, PREFILL_FLOOR),  # a decode alone takes longer
        ({"tpot_target_ms": 1.0, "max_num_batched_tokens": 40}, 39),
        ({"tpot_target_ms": math.inf, "max_num_batched_tokens": 1024}, 1023),
    ],
)
def test_beside_answers_a_prompt_is_cut_to_what_the_target_leaves_but_not_below_the_floor(limits: dict[str, float], num_tokens: int):
    assert beside_a_decode(**limits) == [(1, 1), (2, num_tokens)]


def test_where_nobody_waits_for_a_next_token_the_whole_step_goes_to_prefill():
    desk = Desk(num_blocks=200, max_num_batched_tokens=1024, tpot_target_ms=1.0)
    desk.add(sequence(1, 700), sequence(2, "other", 700))
    assert desk.step() == [(1, 700), (2, 324)]


def test_the_floor_is_for_all_prompts_of_a_step_together():
    desk = Desk(num_blocks=200, tpot_target_ms=1.0)
    desk.add(sequence(1, 20, sampling=LONG))
    desk.step()
    desk.add(sequence(2, "a", 39), sequence(3, "b", 39), sequence(4, "c", 39))
    assert desk.step() == [(1, 1), (2, 40), (3, 24)]
    assert desk.step() == [(1, 1), (2, 1), (3, 16), (4, 40)]


def test_on_a_slower_box_than_was_thought_steps_still_come_to_take_what_they_may():
    true = Coefficients(step=20.0, row=0.1, token=0.3, pair=1e-5, context=1e-4)
    kv, media = KVCacheManager(2000, 16), FakeMedia()
    scheduler = Scheduler(SchedulerLimits(8192, 16, 1024, tpot_target_ms=50.0), kv, media.rows_of, Records())
    scheduler.add(sequence(0, 20, sampling=greedy(max_tokens=3000)))
    durations = []
    for i in range(1, 200):
        if scheduler.num_running + scheduler.num_waiting < 4:
            scheduler.add(sequence(i, str(i), 1500))
        plan = scheduler.schedule(float(i))
        assert plan is not None
        result = stopwatch(plan, true)
        durations.append(1e3 * result.seconds)
        scheduler.apply(result, float(i))
    assert max(durations[40:]) < 53  # as planned by the prior: above 120
    assert sorted(durations[40:])[len(durations[40:]) // 2] > 45


@given(
    st.builds(Coefficients, *[st.floats(1e-6, 1)] * 5),
    st.integers(1, 4096),
    st.floats(-50, 500),
    st.lists(st.integers(0, 8000), min_size=1, max_size=20),
)
def test_chunks_fill_the_time_or_the_floor_and_never_more_than_the_step(costs: Coefficients, most: int, ms: float, starts: list[int]):
    model = CostModel(costs)
    room = PrefillRoom(model, most, ms)
    taken = []
    for start in starts:
        count = room.num_tokens_at(start)
        assert (count > 0) == room.is_open
        room.take(start, start + count)
        taken.append((start, start + count))
    num_tokens = sum(stop - start for start, stop in taken)
    before_last = sum(model.row_ms(start, stop) for start, stop in taken[:-1])
    assert min(most, PREFILL_FLOOR) <= num_tokens <= most
    one_token = max(model.row_ms(start, start + 1) for start, _ in taken)
    assert num_tokens <= PREFILL_FLOOR or before_last <= ms + one_token


def test_the_prior_leaves_room_for_a_picture_within_a_few_steps():
    room = PrefillRoom(CostModel(PRIOR), 1024, 35.0 - CostModel(PRIOR).step_ms(shape_of([(600, 601)] * 64)))
    assert 64 < room.num_tokens_at(0) < 576
