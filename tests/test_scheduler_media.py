"""Prompts whose pictures come late, in any order, or not again."""

from __future__ import annotations

import itertools

import pytest
from kv_world import media_key, sequence
from scheduler_desk import Desk, output

from mmserve.request import FinishReason
from mmserve.scheduler.sequence import Status

BLOCK_SIZES = pytest.mark.parametrize("block_size", [16, 256])
CAT, DOG = media_key("cat"), media_key("dog")


@BLOCK_SIZES
def test_the_text_before_a_picture_is_computed_while_the_picture_is_encoded(block_size: int):
    desk = Desk(block_size=block_size)
    each = sequence(1, 14, ("cat", 30), 6, ("dog", 30), 5)
    desk.add(each)
    assert desk.scheduler.wanted_media() == [(each, each.spans[0]), (each, each.spans[1])]
    assert desk.step() == [(1, 14)]
    assert desk.scheduler.schedule(0.0) is None
    desk.media.encode(DOG)
    assert desk.scheduler.schedule(0.0) is None
    assert desk.scheduler.wanted_media() == [(each, each.spans[0])]
    desk.media.encode(CAT)
    assert desk.scheduler.wanted_media() == []
    assert desk.step() == [(1, 71)]


def test_a_prompt_that_begins_with_a_picture_holds_nothing_until_it_is_there():
    desk = Desk()
    desk.add(sequence(1, ("cat", 30), 5))
    assert desk.scheduler.schedule(0.0) is None
    assert desk.kv.usage == 0
    desk.media.encode(CAT)
    assert desk.step() == [(1, 35)]


def test_a_chunk_may_end_inside_a_picture():
    desk = Desk(max_num_batched_tokens=20)
    desk.media.encode(CAT)
    desk.add(sequence(1, 5, ("cat", 40), 5))
    pieces = []
    for _ in range(3):
        plan = desk.plan()
        pieces += [(piece.row_start, piece.num_rows, piece.token_start) for piece in plan.media]
        desk.land(plan)
    assert pieces == [(0, 15, 5), (15, 20, 0), (35, 5, 0)]


def test_a_single_token_left_of_a_picture_still_comes_from_the_picture():
    desk = Desk(max_num_batched_tokens=20)
    desk.media.encode(CAT)
    desk.add(sequence(1, 5, ("cat", 16)))
    desk.step()
    plan = desk.plan()
    assert (plan.token_ids.tolist(), plan.media[0].row_start) == ([0], 15)
    desk.land(plan)


def test_rows_that_went_away_half_way_are_wanted_again():
    desk = Desk(max_num_batched_tokens=20)
    desk.media.encode(CAT)
    each = sequence(1, 5, ("cat", 40), 5)
    desk.add(each)
    desk.step()
    desk.media.drop(CAT)
    assert desk.scheduler.schedule(0.0) is None
    assert desk.scheduler.wanted_media() == [(each, each.spans[0])]
    desk.media.encode(CAT)
    desk.run()
    assert each.finish_reason is FinishReason.LENGTH


@BLOCK_SIZES
def test_media_covered_by_a_prefix_hit_are_never_wanted(block_size: int):
    desk = Desk(block_size=block_size)
    desk.media.encode(CAT)
    desk.add(sequence(1, 20, ("cat", 60), 20))
    desk.run()
    desk.media.drop(CAT)
    again = sequence(2, 20, ("cat", 60), 8, "another question")
    desk.add(again)
    assert desk.scheduler.wanted_media() == []
    desk.run()
    assert again.finish_reason is FinishReason.LENGTH
    assert again.num_cached_tokens == 80
    beyond = sequence(3, 20, ("cat", 60), 4, ("dog", 8), 4)
    desk.add(beyond)
    assert desk.scheduler.wanted_media() == [(beyond, beyond.spans[1])]


def test_a_picture_that_a_hit_covers_only_in_part_is_wanted():
    desk = Desk()
    desk.media.encode(CAT)
    desk.add(sequence(1, 5, ("cat", 30), 3))  # 32 tokens are published: 27 of the 30 rows
    desk.run()
    desk.media.drop(CAT)
    again = sequence(2, 5, ("cat", 30), 9)
    desk.add(again)
    assert desk.scheduler.wanted_media() == [(again, again.spans[0])]


def test_media_are_wanted_by_who_runs_first():
    desk = Desk(max_num_seqs=4)
    first, small, urgent = sequence(1, 20, ("cat", 200), 5), sequence(2, ("a", 9), 1), sequence(3, ("b", 99), 1, priority=-1)
    desk.add(first)
    desk.step()
    desk.add(small, urgent)
    assert [each.seq_id for each, _ in desk.scheduler.wanted_media()] == [1, 3, 2]


def test_waiting_for_pictures_leaves_most_places_to_others():
    desk = Desk(max_num_seqs=8)
    desk.add(*(sequence(i, 20, ("cat", 30), 5, arrival_s=0.0) for i in range(100, 106)))
    desk.add(*(sequence(i, 20, str(i), ("dog", 30), 5, arrival_s=0.0) for i in range(106, 112)))
    desk.add(*(sequence(i, 20, str(i), arrival_s=9.0) for i in range(1, 10)))
    computed = [seq_id for _ in range(2) for seq_id, _ in desk.step()]
    assert {1, 2, 3, 4, 5, 6} <= set(computed)
    assert len([seq_id for seq_id in computed if seq_id >= 100]) == 2


def test_the_only_place_is_not_kept_by_who_waits_for_a_picture():
    desk = Desk(max_num_seqs=1)
    desk.add(sequence(1, 20, ("cat", 30), 5), sequence(2, 300))
    assert desk.step() == [(2, 256)]
    desk.run()
    desk.media.encode(CAT)
    desk.run()
    assert [each.finish_reason for each in desk.truth.values()] == [FinishReason.LENGTH, FinishReason.LENGTH]


def test_who_waits_for_a_picture_makes_room_for_who_does_not():
    desk = Desk(num_blocks=8)
    stalled, ready = sequence(1, 20, ("cat", 80), 5), sequence(2, ("dog", 90), 5)
    desk.add(stalled)
    assert desk.step() == [(1, 20)]
    desk.media.encode(DOG, 90)
    desk.add(ready)
    assert desk.step() == [(2, 95)]
    desk.run()
    assert (ready.finish_reason, stalled.status, stalled.num_preemptions) == (FinishReason.LENGTH, Status.WAITING, 1)
    desk.media.encode(CAT, 80)
    desk.run()
    assert stalled.finish_reason is FinishReason.LENGTH


def test_who_could_only_start_early_makes_nobody_else_give_way():
    desk = Desk(num_blocks=8)
    desk.add(sequence(1, "first", 20, ("cat", 70), 5))
    desk.step()
    desk.add(sequence(2, "second", 20, ("dog", 70), 5), sequence(3, "third", 5, arrival_s=9.0))
    assert desk.step() == [(3, 10)]
    assert desk.truth[1].num_preemptions == 0
    desk.media.encode(DOG, 70)
    desk.run()
    assert desk.truth[1].num_preemptions == 1
    assert desk.truth[2].finish_reason is FinishReason.LENGTH


def test_without_prefix_caching_nobody_waits_for_what_will_not_be_shared():
    desk = Desk()
    desk.kv.enable_prefix_caching = False
    desk.add(sequence(1, 40), sequence(2, 40))
    assert desk.step() == [(1, 40), (2, 40)]


def test_six_media_that_land_in_any_of_720_orders_give_the_same_tokens():
    """F-42: the same picture twice among them, and a seventh whose rows are there already."""
    media = ("cat", "dog", "cat", "owl", "fox", "emu")

    def answer(order: tuple[int, ...]) -> tuple[int, ...]:
        desk = Desk(num_blocks=60)
        each = sequence(1, 5, *((name, 20) for name in media[:3]), 7, ("bee", 20), *((name, 20) for name in media[3:]), 3)
        desk.media.encode(media_key("bee"))
        desk.add(each)
        desk.run()
        assert not output(each)
        for index in order:
            desk.media.encode(media_key(media[index]))
            desk.run()
        return tuple(output(each))

    (one,) = {answer(order) for order in itertools.permutations(range(len(media)))}
    assert len(one) == 4
