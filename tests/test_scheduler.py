"""The scheduler, scene by scene: who is in a step, with which tokens, and what becomes of the result."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from kv_world import EOS, PLACEHOLDER, FakeMedia, FakeWorker, answer_alone, media_key, sequence

from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.plan import RowSampling, SampledToken, StepFailed, StepPlan, StepResult
from mmserve.request import FinishReason, SamplingParams
from mmserve.scheduler.scheduler import Scheduler, SchedulerLimits, TokenUpdate
from mmserve.scheduler.sequence import Sequence, Status

BLOCK_SIZES = pytest.mark.parametrize("block_size", [16, 256])
CAT, DOG = media_key("cat"), media_key("dog")


class Desk:
    """A scheduler with its worker, stepped by hand; `check` after everything."""

    def __init__(self, *, num_blocks: int = 40, block_size: int = 16, max_num_seqs: int = 8, max_num_batched_tokens: int = 256) -> None:
        self.media = FakeMedia()
        self.kv = KVCacheManager(num_blocks, block_size)
        self.scheduler = Scheduler(SchedulerLimits(4096, max_num_seqs, max_num_batched_tokens), self.kv, self.media.rows_of)
        self.worker = FakeWorker(num_blocks, block_size, self.media)
        self.truth: dict[int, Sequence] = {}
        self.now_s = 0.0

    def add(self, *sequences: Sequence) -> None:
        for each in sequences:
            self.truth[each.seq_id] = each
            self.scheduler.add(each)
            self.scheduler.check()

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_s)
        self.scheduler.check()
        assert plan is not None
        return plan

    def land(self, plan: StepPlan) -> list[TokenUpdate]:
        updates = self.scheduler.apply(self.worker.run(plan, self.truth), self.now_s)
        self.scheduler.check()
        return updates

    def step(self) -> list[tuple[int, int]]:
        """One step; what it computed as (seq_id, number of tokens)."""
        plan = self.plan()
        self.land(plan)
        return rows_of(plan)

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(2000):
            plan = self.scheduler.schedule(self.now_s)
            if plan is None:
                return
            self.land(plan)
        raise AssertionError("no end")

    def fail(self, plan: StepPlan) -> list[TokenUpdate]:
        self.worker.fail(plan)
        updates = self.scheduler.step_failed(StepFailed(plan.step_id, "out_of_memory"))
        self.scheduler.check()
        return updates


def rows_of(plan: StepPlan) -> list[tuple[int, int]]:
    return list(zip(plan.seq_ids, np.diff(plan.query_starts).tolist(), strict=True))


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **fields})  # type: ignore[arg-type]


def output(each: Sequence) -> list[int]:
    return list(each.token_ids[each.num_prompt :])


# One step


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


def test_a_step_smaller_than_the_running_set_starves_nobody():
    desk = Desk(max_num_seqs=8, max_num_batched_tokens=3)
    desk.add(*(sequence(i, 2, str(i)) for i in range(6)))
    desk.run()
    assert all(each.num_output == 4 for each in desk.truth.values())


def test_nothing_to_do_is_no_plan():
    assert Desk().scheduler.schedule(0.0) is None


# Ends


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


def test_blocks_of_a_client_that_left_are_free_when_the_step_lands():
    desk = Desk(num_blocks=4)
    desk.add(sequence(1, 33))
    plan = desk.plan()
    assert desk.kv.num_available == 1
    desk.scheduler.abort(1)
    desk.scheduler.check()
    assert desk.kv.num_available == 1
    assert desk.land(plan) == []
    assert desk.kv.num_available == 4


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


# Media


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


# Sharing


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


# Order


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
    assert desk.truth[0].first_step_s == pytest.approx(2.0)


def test_who_lacks_blocks_is_not_overtaken_by_who_needs_fewer():
    desk = Desk(num_blocks=10)
    desk.add(sequence(1, 100))
    desk.step()
    desk.add(sequence(2, "large", 80, arrival_s=2.0), sequence(3, "small", 5, arrival_s=9.0))
    assert desk.step() == [(1, 1)]
    assert desk.scheduler.num_waiting == 2
    desk.run()
    assert desk.truth[2].first_step_s is not None


# Pressure


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
