"""What sequences share, what they must not, and who waits for whom to share it."""

from __future__ import annotations

from array import array

import pytest
from kv_world import answer_alone, media_key, sequence
from scheduler_desk import Desk, greedy, output

from mmserve.plan import StepResult
from mmserve.request import FinishReason
from mmserve.scheduler.sequence import Sequence

BLOCK_SIZES = pytest.mark.parametrize("block_size", [16, 256])
CAT, DOG = media_key("cat"), media_key("dog")


@BLOCK_SIZES
def test_equal_prompts_with_different_pictures_share_only_the_text_before_them(block_size: int):
    desk = Desk(block_size=block_size)
    desk.media.encode(CAT)
    desk.media.encode(DOG)
    cat, dog = sequence(1, 40, ("cat", 40), 40), sequence(2, 40, ("dog", 40), 40)
    assert cat.token_ids == dog.token_ids
    desk.add(cat)
    desk.run()
    desk.add(dog)
    desk.run()
    assert dog.num_cached_tokens == 32
    same = sequence(3, 40, ("cat", 40), 40)
    desk.add(same)
    desk.run()
    assert same.num_cached_tokens == 112
    assert (desk.scheduler.num_prefix_queries, desk.scheduler.num_prefix_hits) == (360, 144)


@BLOCK_SIZES
def test_salts_share_nothing(block_size: int):
    desk = Desk(block_size=block_size)
    for seq_id, salt in enumerate([b"a", b"b", b"a"]):
        desk.add(sequence(seq_id, 64, salt=salt))
        desk.run()
    assert [each.num_cached_tokens for each in desk.truth.values()] == [0, 0, 63]


@BLOCK_SIZES
def test_choices_of_one_request_compute_their_prompt_once(block_size: int):
    desk = Desk(block_size=block_size)
    choices = [sequence(i, 100, sampling=greedy(temperature=1.0), seed=i, arrival_s=0.0) for i in range(4)]
    expected = [answer_alone(each) for each in choices]
    desk.add(*choices)
    assert desk.step() == [(0, 100)]
    assert desk.step() == [(0, 1), (1, 4), (2, 4), (3, 4)]
    desk.run()
    assert [output(each) for each in choices] == expected
    assert len({tuple(output(each)) for each in choices}) == 4


def test_a_prompt_that_is_cached_but_for_its_last_token_waits_for_nobody():
    desk = Desk()
    desk.add(sequence(1, 32))
    desk.run()
    desk.add(*(sequence(i, 32) for i in (2, 3, 4)))
    assert desk.step() == [(2, 1), (3, 1), (4, 1)]


def test_what_is_shared_is_waited_for_only_as_far_as_it_is_shared():
    desk = Desk(max_num_batched_tokens=32, num_blocks=80)
    desk.add(sequence(1, 200), sequence(2, 32, "and then something else, altogether"))
    assert desk.step() == [(1, 32)]
    assert desk.step() == [(1, 32)]  # who runs goes first
    desk.scheduler.abort(1)
    assert desk.step() == [(2, 32)]
    assert desk.truth[2].num_cached_tokens == 32


def test_an_answer_is_found_by_the_next_turn_of_its_conversation():
    desk = Desk()
    first = sequence(1, 30, sampling=greedy(max_tokens=20))
    desk.add(first)
    desk.run()
    second = Sequence(2, first.token_ids + array("i", [4, 5, 6]), greedy())
    desk.add(second)
    desk.run()
    assert second.num_cached_tokens == 48  # 49 have KV, three strides are full


def test_a_row_that_was_not_finite_fails_alone_and_poisons_no_cache():
    desk = Desk()
    bad, good = sequence(1, 40), sequence(2, 40, arrival_s=2.0, salt=b"other")
    desk.add(bad, good)
    plan = desk.plan()
    result = desk.worker.run(plan, desk.truth)
    updates = desk.scheduler.apply(StepResult(1, (None, result.tokens[1]), failed_rows=(0,)), 0.0)
    desk.scheduler.check()
    assert [(update.sequence, update.token, update.finish_reason, update.error) for update in updates] == [
        (bad, None, FinishReason.ERROR, "numerical_error"),
        (good, result.tokens[1], None, None),
    ]
    assert desk.kv.match(bad.block_hashes, 40) == 0
    desk.run()
    assert desk.kv.match(good.block_hashes, 40) == 32


def test_chunks_that_landed_before_a_bad_one_are_withdrawn_too():
    desk = Desk(max_num_batched_tokens=16)
    bad = sequence(1, 40)
    desk.add(bad)
    desk.step()
    desk.step()
    assert desk.kv.match(bad.block_hashes, 40) == 32
    desk.scheduler.apply(StepResult(desk.plan().step_id, (None,), failed_rows=(0,)), 0.0)
    desk.scheduler.check()
    assert desk.kv.match(bad.block_hashes, 40) == 0
    assert desk.kv.num_available == 40
