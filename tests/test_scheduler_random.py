"""Thousands of random steps: every slot a row reads must hold what the oracle says, every answer must be the one given alone.

Prompts collide in everything but a picture or a last word, memory is short, pictures arrive in any order and go away again, clients
leave, steps fail and workers die, before, during and after steps.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

import pytest
from kv_world import EOS, FakeMedia, FakeWorker, answer_alone, sequence

from mmserve.media import MediaSpan
from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.plan import SampledToken, StepFailed, StepPlan, StepResult
from mmserve.request import FinishReason, SamplingParams
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler, TokenUpdate
from mmserve.scheduler.sequence import Sequence, Status

MAX_STEPS = 4000


@dataclass(frozen=True)
class Flight:
    plan: StepPlan
    epochs: dict[int, int]  # of its sequences, when it was planned


class Town:
    """One replica, its worker and its clients, all driven by one random number generator."""

    def __init__(self, seed: int, block_size: int, *, deaths: bool = True) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.unit = block_size // 4 if block_size > 16 else 8  # lengths are made of these, so that blocks and prompts interfere
        self.answer_lengths = [1, 5, 3 * self.unit, 8 * self.unit]
        self.num_blocks = self.rng.choice([7, 10, 30])
        self.limits = SchedulerLimits(
            max_model_len=self.num_blocks * block_size,
            max_num_seqs=self.rng.choice([1, 3, 8]),
            max_num_batched_tokens=self.rng.choice([self.unit - 3, 2 * block_size + 3, 8 * block_size]),
            tpot_target_ms=self.rng.choice([math.inf, 35.0, 0.001]),
        )
        self.deaths = deaths
        self.is_pipelined = self.rng.random() < 0.75
        self.prefix_caching = self.rng.random() < 0.9
        self.media = FakeMedia()
        self.now_s = 0.0
        self.live: dict[int, Sequence] = {}
        self.all: dict[int, Sequence] = {}
        self.expected: dict[int, list[int]] = {}
        self.said: dict[int, list[int]] = {}
        self.old_steps: list[int] = []
        self.num_steps = 0
        self.start_worker()

    def start_worker(self) -> None:
        self.kv = KVCacheManager(self.num_blocks, self.block_size, self.prefix_caching)
        self.scheduler = Scheduler(self.limits, self.kv, self.media.rows_of, Records())
        self.worker = FakeWorker(self.num_blocks, self.block_size, self.media)
        self.flights: deque[Flight] = deque()  # steps that were sent, oldest first; each is run when its turn to land comes

    def check(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)

    def add(self) -> None:
        rng, unit = self.rng, self.unit
        num_choices = rng.choice([1, 1, 1, 3])
        pictures = [(rng.choice(["cat", "dog"]), rng.choice([unit, 2 * unit + 1])) for _ in range(rng.choice([0, 0, 1, 2]))]
        parts: list[int | str | tuple[str, int]] = [rng.choice([3, unit, 3 * unit])]
        for picture in pictures:
            parts += [(f"{picture[0]}{picture[1]}", picture[1]), rng.choice([0, 2, unit])]
        parts += [rng.choice([1, 5, unit, 2 * unit]), rng.choice(["", "?", "!"])]
        fields = {
            "sampling": SamplingParams(
                max_tokens=rng.choice([None, None, 1, 4, 2 * unit]),
                temperature=rng.choice([0.0, 1.0]),
                min_tokens=rng.choice([0, 0, 2]),
                stop_token_ids=rng.choice([(), (7, 8, 9)]),
            ),
            "eos_token_ids": (EOS,),
            "priority": rng.choice([0, 0, 1]),
            "salt": rng.choice([b"", b"", b"tenant"]),
        }
        total = len(sequence(0, *parts).token_ids) + rng.choice(self.answer_lengths)
        total = max(min(total, self.limits.max_model_len), len(sequence(0, *parts).token_ids) + 1)
        if total > self.limits.max_model_len:
            return
        for _ in range(num_choices):
            seq_id = len(self.all)
            each = sequence(seq_id, *parts, **fields, max_total_tokens=total, seed=rng.randrange(2**64), arrival_s=self.now_s)
            self.expected[seq_id] = answer_alone(each)
            self.said[seq_id] = []
            self.all[seq_id] = self.live[seq_id] = each
            self.scheduler.add(each)

    def remove(self) -> None:
        if self.live:
            seq_id = self.rng.choice(list(self.live))
            if self.rng.random() < 0.5:
                self.scheduler.abort(seq_id)
            else:
                self.scheduler.finish(seq_id, FinishReason.STOP)
            self.scheduler.abort(seq_id)  # whoever ends a sequence says so, perhaps twice
            self.ended(seq_id)

    def ended(self, seq_id: int) -> None:
        each = self.live.pop(seq_id)
        assert each.status is Status.FINISHED
        assert list(each.block_table.block_ids) == []
        answer, said = self.expected[seq_id], self.said[seq_id]
        assert list(each.token_ids[each.num_prompt :]) == said
        assert said == answer[: len(said)]
        if each.finish_reason is FinishReason.LENGTH:
            assert said == answer

    def encode(self) -> None:
        wanted = self.scheduler.wanted_media()
        for each, span in wanted:
            assert span.stop > each.num_scheduled
            assert self.media.rows_of(span.key) is None
        spans: list[MediaSpan] = [span for _, span in wanted]
        self.rng.shuffle(spans)
        for span in spans[: self.rng.randint(0, 3)]:
            self.media.encode(span.key, span.stop - span.start)
        in_use = {piece.key for flight in self.flights for piece in flight.plan.media}
        if self.media.keys and self.rng.random() < 0.1:
            key = self.rng.choice(self.media.keys)
            if key not in in_use:
                self.media.drop(key)

    def meanwhile(self, rate: float) -> None:
        """What may happen at any time, also while steps are in flight."""
        if self.rng.random() < rate:
            self.add()
        if self.rng.random() < rate / 4:
            self.remove()
        self.encode()
        self.check()

    def step(self, rate: float) -> bool:
        """Send a step, or land one, or both.  False if there was neither."""
        self.now_s += self.rng.choice([0.0, 0.01, 3.0])
        is_sent = (not self.flights or self.is_pipelined) and self.send()
        self.meanwhile(rate)
        if self.flights and (len(self.flights) == MAX_STEPS_IN_FLIGHT or not is_sent or not self.is_pipelined or self.rng.random() < 0.3):
            self.land()
            self.check()
            return True
        return is_sent

    def send(self) -> bool:
        plan = self.scheduler.schedule(self.now_s)
        self.check()
        if plan is None:
            return False
        self.num_steps += 1
        assert len(plan.token_ids) <= self.limits.max_num_batched_tokens
        assert len(plan.seq_ids) <= self.limits.max_num_seqs
        for seq_id, context in zip(plan.seq_ids, plan.context_lens.tolist(), strict=True):
            begun = [span for span in self.all[seq_id].spans if span.start < context]
            room = len(self.all[seq_id].block_table.block_ids) * self.block_size
            assert all(span.stop <= room for span in begun), "a span was begun without room to its end"
        in_flight = {piece.key for piece in plan.media}
        assert in_flight <= set(self.media.keys)
        self.flights.append(Flight(plan, {seq_id: self.all[seq_id].epoch for seq_id in plan.seq_ids}))
        return True

    def land(self) -> None:
        luck = self.rng.random()
        if self.deaths and luck < 0.02:
            self.die()
            return
        flight = self.flights.popleft()
        plan = flight.plan
        stale = {seq_id for seq_id, epoch in flight.epochs.items() if self.all[seq_id].epoch != epoch}
        if self.deaths and luck < 0.06 and len(plan.token_ids) > 1:
            self.worker.fail(plan)
            self.take(self.scheduler.step_failed(StepFailed(plan.step_id, "out_of_memory")))
        else:
            result = self.worker.run(plan, self.all, stale)
            if isinstance(result, StepFailed):
                assert stale, "a step that builds on another was not run though nobody's tokens are missing"
                assert self.scheduler.step_failed(result) == []
                return
            if self.deaths and luck > 0.99:
                result = self.with_failed_row(result)
            self.take(self.scheduler.apply(result, self.now_s))
        self.old_steps.append(plan.step_id)
        if self.rng.random() < 0.05:
            self.repeat_an_old_result()

    def with_failed_row(self, result: StepResult) -> StepResult:
        row = self.rng.randrange(len(result.tokens))
        tokens = list(result.tokens)
        tokens[row] = None
        self.worker.sampled = tuple(tokens)
        return StepResult(result.step_id, tuple(tokens), failed_rows=(row,))

    def repeat_an_old_result(self) -> None:
        before = self.scheduler.num_late_results
        assert self.scheduler.apply(StepResult(self.old_steps[-1], (SampledToken(3),)), self.now_s) == []
        assert self.scheduler.num_late_results == before + 1

    def die(self) -> None:
        aboard = set(self.flights[0].plan.seq_ids)  # the step that ran
        before = {seq_id: each.num_worker_deaths for seq_id, each in self.live.items()}
        orphans = self.scheduler.evacuate()
        assert {each.seq_id for each in orphans} == set(self.live)
        self.scheduler.check()
        assert self.kv.num_available == self.num_blocks
        self.start_worker()
        for each in orphans:
            assert each.num_worker_deaths == before[each.seq_id] + (each.seq_id in aboard)
            self.scheduler.add(each)

    def take(self, updates: list[TokenUpdate]) -> None:
        assert len({update.sequence.seq_id for update in updates}) == len(updates)
        for update in updates:
            seq_id = update.sequence.seq_id
            assert seq_id in self.live, "an update for a sequence that has ended"
            if update.token is not None:
                self.said[seq_id].append(update.token.token_id)
            assert self.said[seq_id] == self.expected[seq_id][: len(self.said[seq_id])]
            if update.finish_reason is FinishReason.ERROR:
                assert update.error == "numerical_error"
            elif update.finish_reason is not None:
                assert self.said[seq_id] == self.expected[seq_id]
                ends = self.said[seq_id][-1] in update.sequence.end_token_ids
                assert update.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
            if update.finish_reason is not None:
                self.ended(seq_id)

    def settle(self) -> None:
        """No more arrivals or faults: everybody must come to an end."""
        self.deaths = False
        idle = 0
        while self.live or self.flights:
            idle = 0 if self.step(rate=0.0) else idle + 1
            assert idle < 200, "nothing moves any more"
            assert self.num_steps < MAX_STEPS
        assert self.scheduler.schedule(self.now_s) is None
        assert self.scheduler.wanted_media() == []
        assert self.kv.num_available == self.num_blocks
        assert self.kv.usage == 0
        self.kv.check([])


@pytest.mark.parametrize(("seed", "block_size"), [*((seed, 16) for seed in range(14)), *((seed, 256) for seed in range(5))])
def test_every_answer_is_the_one_given_alone_whatever_happens(seed: int, block_size: int):
    town = Town(seed, block_size)
    for _ in range(80):
        town.step(rate=0.4)
    town.settle()


@pytest.mark.parametrize(("seed", "block_size"), [*((seed, 16) for seed in range(100, 104)), (104, 256), (105, 256)])
def test_a_crowd_that_comes_at_once_is_served_to_the_end(seed: int, block_size: int):
    town = Town(seed, block_size, deaths=False)
    for _ in range(20):
        town.add()
    town.settle()
    assert all(each.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for each in town.all.values())


@pytest.mark.parametrize(("seed", "block_size"), [*((seed, 16) for seed in range(200, 206)), (216, 256)])
def test_long_answers_in_little_memory_are_preempted_and_still_right(seed: int, block_size: int):
    town = Town(seed, block_size, deaths=False)
    town.answer_lengths = [6 * town.unit, 10 * town.unit]
    town.num_blocks = 10
    town.limits = SchedulerLimits(10 * block_size, max_num_seqs=8, max_num_batched_tokens=4 * block_size)
    town.start_worker()
    for _ in range(60):
        town.step(rate=0.5)
    town.settle()
    assert town.scheduler.num_preemptions > 0
