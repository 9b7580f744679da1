"""A request that ends workers is found out and nobody else is lost for it: suspects are computed alone, one after another."""

from __future__ import annotations

import random

import pytest
from kv_world import answer_alone, media_key, sequence
from scheduler_desk import Desk, greedy, output

from mmserve.plan import StepPlan
from mmserve.request import FinishReason
from mmserve.scheduler.sequence import Sequence
from mmserve.scheduler.trials import MAX_DEATHS, SUSPECT_DEATHS


class Ward:
    """A desk whose worker dies over certain steps, and is followed by another, as in a decoder group."""

    def __init__(self, *sequences: Sequence, kills, num_ahead: int = 1) -> None:  # type: ignore[no-untyped-def]
        self.kills = kills  # whether the worker dies over a plan
        self.num_ahead = num_ahead  # steps sent before the oldest is answered
        self.lost: list[Sequence] = []
        self.num_deaths = 0
        self.plans: list[StepPlan] = []
        self.desk = Desk()
        self.desk.add(*sequences)

    def run(self) -> None:
        flights: list[StepPlan] = []
        for _ in range(3000):
            plan = None if len(flights) > self.num_ahead else self.desk.scheduler.schedule(self.desk.now_s)
            if plan is not None:
                self.check_alone(plan)
                self.plans.append(plan)
                flights.append(plan)
            elif not flights:
                return
            else:
                plan = flights.pop(0)
                if self.kills(plan):
                    flights.clear()
                    self.die()
                else:
                    self.desk.land(plan)
        raise AssertionError("no end")

    def check_alone(self, plan: StepPlan) -> None:
        truth = self.desk.truth
        starts = plan.context_lens - (plan.query_starts[1:] - plan.query_starts[:-1])
        on_trial = [seq_id for seq_id, start in zip(plan.seq_ids, starts.tolist(), strict=True) if start < truth[seq_id].trial_stop]
        assert not on_trial or len(plan.seq_ids) == 1, "a suspect was not alone"

    def die(self) -> None:
        self.num_deaths += 1
        orphans = self.desk.scheduler.evacuate()
        self.lost += [each for each in orphans if each.is_fatal]
        self.desk = Desk()
        self.desk.add(*(each for each in orphans if not each.is_fatal))


def ids(sequences: list[Sequence]) -> list[int]:
    return [each.seq_id for each in sequences]


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("at", [0, 20, 41])  # in the middle of its prompt, or of its answer
def test_only_the_one_at_fault_is_lost_and_after_three_deaths(num_ahead: int, at: int):
    everybody = [sequence(i, 40, sampling=greedy(max_tokens=6, ignore_eos=True)) for i in range(1, 8)]
    expected = {each.seq_id: answer_alone(each) for each in everybody}

    def kills(plan: StepPlan) -> bool:
        return any(seq_id == 4 and stop > at for seq_id, stop in zip(plan.seq_ids, plan.context_lens.tolist(), strict=True))

    ward = Ward(*everybody, kills=kills, num_ahead=num_ahead)
    ward.run()
    assert ids(ward.lost) == [4]
    assert ward.num_deaths == SUSPECT_DEATHS + 1
    assert {each.seq_id: output(each) for each in everybody if each.seq_id != 4} == {i: out for i, out in expected.items() if i != 4}


def test_two_that_are_at_fault_are_both_found_and_those_beside_them_are_not_lost():
    everybody = [sequence(i, 30, sampling=greedy(max_tokens=5, ignore_eos=True)) for i in range(1, 7)]
    ward = Ward(*everybody, kills=lambda plan: bool({2, 5} & set(plan.seq_ids)))
    ward.run()
    assert sorted(ids(ward.lost)) == [2, 5]
    assert all(each.finish_reason is FinishReason.LENGTH for each in everybody if each not in ward.lost)


def test_bad_luck_twice_costs_nobody_anything():
    everybody = [sequence(i, 20 + i, sampling=greedy(max_tokens=8, ignore_eos=True)) for i in range(1, 7)]
    expected = [answer_alone(each) for each in everybody]
    luck = iter([False, False, True, False, True])
    ward = Ward(*everybody, kills=lambda plan: next(luck, False))
    ward.run()
    assert ward.num_deaths == 2
    assert not ward.lost
    assert [output(each) for each in everybody] == expected
    assert all(each.trial_stop == 0 or each.num_computed < each.trial_stop for each in everybody)


def test_what_runs_is_blamed_and_not_what_waits_behind_it():
    """Everybody with a row in any step in flight used to be blamed, also those of the next step, which had not begun."""
    desk = Desk(max_num_batched_tokens=32)
    first, second = sequence(1, "one", 29), sequence(2, "two", 29)
    desk.add(first, second)
    assert [plan.seq_ids for plan in (desk.plan(), desk.plan())] == [(1,), (1, 2)]
    desk.scheduler.evacuate()
    assert (first.num_worker_deaths, second.num_worker_deaths) == (1, 0)


def test_a_suspect_and_the_crowd_take_turns():
    suspect, other = sequence(1, "one", 37), sequence(2, "two", 37)
    suspect.trial_stop = 41
    desk = Desk(max_num_batched_tokens=16)
    desk.add(suspect, other)
    assert [desk.step() for _ in range(6)] == [[(1, 16)], [(2, 16)], [(1, 16)], [(2, 16)], [(1, 8)], [(2, 8)]]
    assert desk.step() == [(1, 1)]
    assert suspect.trial_stop == 0  # past the place: one of the crowd again
    assert desk.step() == [(1, 1), (2, 1)]


def test_a_suspect_that_waits_for_its_picture_keeps_nobody_from_running():
    suspect, other, third = sequence(1, ("cat", 20), 5), sequence(2, "two", 37), sequence(3, "three", 25)
    suspect.trial_stop, third.trial_stop = 27, 32
    desk = Desk()
    desk.add(suspect, other, third)
    assert desk.step() == [(3, 30)]
    assert desk.step() == [(2, 40)]
    assert [span.key for _, span in desk.scheduler.wanted_media()] == [media_key("cat")]
    desk.media.encode(media_key("cat"))
    desk.run()
    assert all(each.finish_reason is FinishReason.LENGTH for each in (suspect, other, third))


def test_whoever_was_aboard_very_many_deaths_is_lost_whatever_its_trials_said():
    unlucky = sequence(1, 20, sampling=greedy(max_tokens=60, ignore_eos=True))
    other = sequence(2, 20, sampling=greedy(max_tokens=60, ignore_eos=True))
    ward = Ward(unlucky, other, kills=lambda plan: set(plan.seq_ids) == {1, 2} and plan.context_lens.max() > 25)
    ward.run()
    assert ward.num_deaths == MAX_DEATHS
    assert sorted(ids(ward.lost)) == [1, 2]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_dies_when_only_those_alone_at_the_time_are_lost(seed: int):
    rng = random.Random(seed)
    everybody = [sequence(i, rng.randint(5, 60), sampling=greedy(max_tokens=rng.randint(1, 9), ignore_eos=True)) for i in range(1, 9)]
    expected = {each.seq_id: answer_alone(each) for each in everybody}
    guilty = set(rng.sample(range(1, 9), rng.randint(0, 2)))
    deaths_by_chance = rng.randint(0, 2)
    blamed_alone: set[int] = set()

    def kills(plan: StepPlan) -> bool:
        nonlocal deaths_by_chance
        dies = bool(guilty & set(plan.seq_ids))
        if not dies and deaths_by_chance and rng.random() < 0.1:
            deaths_by_chance -= 1
            dies = True
        if dies and len(plan.seq_ids) == 1:
            blamed_alone.update(plan.seq_ids)
        return dies

    ward = Ward(*everybody, kills=kills, num_ahead=rng.randint(0, 1))
    ward.run()
    assert guilty <= set(ids(ward.lost)) <= blamed_alone
    lost = set(ids(ward.lost))
    assert {each.seq_id: output(each) for each in everybody if each.seq_id not in lost} == {
        i: out for i, out in expected.items() if i not in lost
    }
