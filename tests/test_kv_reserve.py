"""What a newcomer must leave of the cache: for answers under way, and for a prompt as large as they come."""

from __future__ import annotations

import random

import pytest
from kv_world import media_key, sequence
from scheduler_desk import Desk, greedy

from mmserve.scheduler.kv_reserve import MAX_HORIZON, MIN_PROMPT, NUM_RECENT, RELAX_STEPS, KVReserve

BLOCK_SIZES = pytest.mark.parametrize("block_size", [16, 256])
LARGE = 100_000  # blocks: no cache to be careful of


@BLOCK_SIZES
def test_before_anything_was_seen_a_prompt_of_two_thousand_tokens_is_reckoned_with(block_size: int):
    assert KVReserve(LARGE, block_size).num_prompt_blocks == MIN_PROMPT // block_size


def test_the_largest_usual_prompt_counts_and_not_the_average():
    reserve = KVReserve(LARGE, 16)
    for i in range(500):
        reserve.observe(5000 if i % 50 == 0 else 100)
    assert reserve.num_prompt_blocks == 313


def test_one_huge_prompt_in_a_thousand_is_not_usual():
    reserve = KVReserve(LARGE, 16)
    for i in range(1000):
        reserve.observe(50_000 if i == 700 else 2500)
    assert reserve.num_prompt_blocks == 157


def test_what_was_usual_long_ago_is_forgotten():
    reserve = KVReserve(LARGE, 16)
    for _ in range(NUM_RECENT):
        reserve.observe(8000)
    for _ in range(NUM_RECENT):
        reserve.observe(100)
    assert reserve.num_prompt_blocks == MIN_PROMPT // 16


@pytest.mark.parametrize("seed", range(5))
def test_the_window_gives_what_sorting_it_would(seed: int):
    rng, reserve, seen = random.Random(seed), KVReserve(LARGE, 16), []
    for _ in range(1500):
        seen.append(rng.choice([rng.randrange(1, 9000), 3000]))
        reserve.observe(seen[-1])
        recent = sorted(seen[-NUM_RECENT:])
        usual = max(MIN_PROMPT, recent[int(0.99 * (len(recent) - 1))])
        assert reserve.num_prompt_blocks == -(-usual // 16)


@pytest.mark.parametrize(("num_blocks", "reserved"), [(7, 0), (8, 1), (40, 5), (1000, 125), (2000, 128)])
def test_a_small_cache_is_not_kept_empty_for_prompts_it_could_hardly_hold(num_blocks: int, reserved: int):
    assert KVReserve(num_blocks, 16).num_prompt_blocks == reserved


def test_after_memory_ran_out_more_is_left_to_grow_into_and_only_slowly_less_again():
    reserve = KVReserve(LARGE, 16)
    running = [sequence(1, 20, max_total_tokens=1000), sequence(2, 20, max_total_tokens=24)]
    for each in running:
        each.block_table.block_ids.extend([2 * each.seq_id, 2 * each.seq_id + 1])
    seen = []
    for _ in range(6):
        seen.append((reserve.horizon, reserve.num_growth_blocks(running)))
        reserve.tighten()
    assert seen == [(16, 1), (32, 2), (64, 4), (128, 8), (256, 16), (256, 16)]
    for _ in range(RELAX_STEPS - 1):
        reserve.relax()
    assert reserve.horizon == MAX_HORIZON
    reserve.relax()
    assert reserve.horizon == MAX_HORIZON - 16
    for _ in range(100 * RELAX_STEPS):
        reserve.relax()
    assert reserve.horizon == 16


@BLOCK_SIZES
def test_small_prompts_leave_room_for_a_large_one_that_comes_later(block_size: int):
    desk = Desk(num_blocks=80, block_size=block_size, max_num_seqs=100, max_num_batched_tokens=2**14)
    large_blocks = 8  # what two thousand tokens take, or less than an eighth of the cache
    long = greedy(max_tokens=3 * block_size)
    desk.add(*(sequence(i, f"{i:02}", 2 * block_size - 10, sampling=long) for i in range(50)))
    desk.step()
    assert 0 < desk.scheduler.num_running < 40
    large = sequence(99, "large", large_blocks * block_size - 20, arrival_s=-99.0)
    desk.add(large)
    desk.step()
    assert large.first_step_s is not None
    assert desk.scheduler.num_preemptions == 0


def test_a_preemption_and_a_step_that_ran_out_of_memory_both_make_newcomers_leave_more():
    desk = Desk(num_blocks=5)
    desk.add(*(sequence(i, str(i), 30, sampling=greedy(max_tokens=30)) for i in range(2)))
    horizons = [desk.scheduler._reserve.horizon]
    while not desk.scheduler.num_preemptions:
        desk.step()
    horizons.append(desk.scheduler._reserve.horizon)
    desk.fail(desk.plan())
    horizons.append(desk.scheduler._reserve.horizon)
    assert horizons == [16, 32, 64]


@BLOCK_SIZES
def test_a_picture_is_let_in_whole_or_not_at_all(block_size: int):
    desk = Desk(num_blocks=8, block_size=block_size, max_num_batched_tokens=block_size)
    cat = media_key("cat")
    desk.media.encode(cat, 5 * block_size)
    first = sequence(1, 4 * block_size - 2, sampling=greedy(max_tokens=2))
    pictured = sequence(2, "see ", ("cat", 5 * block_size), 3)
    desk.add(first, pictured)
    while first.finish_reason is None:
        assert pictured.num_computed == 0, "four free blocks hold only a part of the picture"
        desk.step()
    desk.step()
    assert 0 < pictured.num_computed < pictured.spans[0].stop
    assert len(pictured.block_table.block_ids) * block_size >= pictured.spans[0].stop
    desk.run()
    assert pictured.num_preemptions == 0
