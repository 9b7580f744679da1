"""The next step is planned while one runs: rows for tokens nobody knows yet, and what becomes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from kv_world import EOS, FakeMedia, answer_alone, sequence
from scheduler_desk import Desk, greedy, output, rows_of

from mmserve.errors import WorkerDied
from mmserve.metrics import Metrics
from mmserve.plan import DecoderReady, RowSampling, SampledToken, StepFailed, StepPlan, StepResult
from mmserve.replica import Replica
from mmserve.request import FinishReason
from mmserve.scheduler.cost_model import CostModel
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import TokenUpdate
from mmserve.sim.virtual_time import run_in_virtual_time
from mmserve.worker.in_order import InOrder


def test_the_next_step_takes_up_a_token_that_is_not_known_yet() -> None:
    desk = Desk()
    desk.add(sequence(1, 5, "a"), sequence(2, 7, "b"))
    truth = {seq_id: answer_alone(each) for seq_id, each in desk.truth.items()}
    first, second = desk.plan(), desk.plan()
    assert second.sampled_by.tolist() == [0, 1]
    assert rows_of(second) == [(1, 1), (2, 1)]
    assert second.context_lens.tolist() == [7, 9]
    desk.land(first)
    third = desk.plan()
    desk.land(second)
    desk.land(third)
    assert {seq_id: output(each) for seq_id, each in desk.truth.items()} == {seq_id: answer[:3] for seq_id, answer in truth.items()}


def test_a_prompt_goes_on_in_the_next_step_where_this_one_stops() -> None:
    desk = Desk(max_num_batched_tokens=16)
    each = sequence(1, 40)
    desk.add(each)
    truth = answer_alone(each)
    plans = [desk.plan(), desk.plan()]
    desk.land(plans[0])
    plans.append(desk.plan())
    assert [(plan.sampled_by.tolist(), *rows_of(plan)) for plan in plans] == [([-1], (1, 16)), ([-1], (1, 16)), ([-1], (1, 8))]
    for plan in plans[1:]:
        desk.land(plan)
    assert output(each) == truth[:1]


def test_nothing_is_computed_beyond_the_last_token_that_may_come() -> None:
    desk = Desk()
    desk.add(sequence(1, 5, sampling=greedy(max_tokens=2)))
    first, second = desk.plan(), desk.plan()
    desk.land(first)
    assert desk.scheduler.schedule(0.0) is None
    (update,) = desk.land(second)
    assert update.finish_reason is FinishReason.LENGTH


def test_a_row_of_an_answer_that_has_ended_says_nothing_and_its_blocks_are_another_s() -> None:
    desk = Desk(num_blocks=2)
    each = sequence(1, 17, sampling=greedy(max_tokens=9, stop_token_ids=tuple(range(90))), eos_token_ids=(EOS,))
    desk.add(each)
    first, second = desk.plan(), desk.plan()
    (update,) = desk.land(first)
    assert update.finish_reason is FinishReason.STOP
    desk.add(sequence(2, "other", 20))
    third = desk.plan()
    assert rows_of(third) == [(2, 25)]
    assert desk.land(second, stale={1}) == []
    desk.land(third)
    assert len(output(each)) == 1
    assert output(desk.truth[2]) == answer_alone(sequence(2, "other", 20))[:1]


def test_what_follows_a_step_that_failed_is_void() -> None:
    desk = Desk()
    desk.add(sequence(1, 5, "a"))
    first, second = desk.plan(), desk.plan()
    assert desk.fail(first) == []
    after = desk.worker.run(second, desk.truth, stale={1})
    assert after == StepFailed(second.step_id, "follows_failed_step")
    room = desk.scheduler._budget.num_tokens
    assert desk.scheduler.step_failed(after) == []
    assert desk.scheduler._budget.num_tokens == room, "a step that was not tried says nothing about memory"
    desk.run()
    assert output(desk.truth[1]) == answer_alone(sequence(1, 5, "a"))


def test_after_a_step_that_failed_nothing_is_planned_before_what_built_on_it_has_landed() -> None:
    """Each step was planned while one that could not be run was in flight, built on it, and could not be run either: for ever."""
    desk = Desk(max_num_batched_tokens=8)
    desk.add(sequence(1, 5, "a"), sequence(2, 30, "b"))
    first, second = desk.plan(), desk.plan()
    assert second.sampled_by.tolist() == [0, -1]
    desk.fail(first)
    assert desk.scheduler.schedule(0.0) is None
    after = desk.worker.run(second, desk.truth, stale={1})
    assert isinstance(after, StepFailed)
    desk.scheduler.step_failed(after)
    desk.scheduler.check()
    desk.run()
    assert output(desk.truth[1]) == answer_alone(sequence(1, 5, "a"))
    assert output(desk.truth[2]) == answer_alone(sequence(2, 30, "b"))


def test_who_must_make_room_while_a_step_computes_him_says_the_same_later() -> None:
    desk = Desk(num_blocks=4)
    desk.add(sequence(1, 14, "a", sampling=greedy(max_tokens=40)), sequence(2, 15, "b", sampling=greedy(max_tokens=40)))
    truth = {seq_id: answer_alone(each) for seq_id, each in desk.truth.items()}
    flights: list[tuple[StepPlan, dict[int, int]]] = []
    while any(each.finish_reason is None for each in desk.truth.values()):
        plan = desk.scheduler.schedule(0.0) if len(flights) < 2 else None
        desk.scheduler.check()
        if plan is not None:
            flights.append((plan, {seq_id: desk.truth[seq_id].epoch for seq_id in plan.seq_ids}))
        if plan is None or len(flights) == 2:
            plan, epochs = flights.pop(0)
            desk.land(plan, stale={seq_id for seq_id, epoch in epochs.items() if desk.truth[seq_id].epoch != epoch})
    assert desk.scheduler.num_preemptions > 0
    assert {seq_id: output(each) for seq_id, each in desk.truth.items()} == truth


def test_a_plan_is_completed_by_the_step_before_penalties_and_all() -> None:
    desk = Desk()
    desk.add(sequence(1, 5, sampling=greedy(presence_penalty=0.5)), sequence(2, 6))
    first, second = desk.plan(), desk.plan()
    how = second.sampling[0]
    assert how is not None
    assert how.output_ids is not None
    assert (first.query_starts.tolist(), how.output_ids.tolist()) == ([0, 5, 11], [])
    whole = second.completed((SampledToken(41), SampledToken(42)))
    assert whole.token_ids.tolist() == [41, 42]
    assert isinstance(whole.sampling[0], RowSampling)
    assert whole.sampling[0].output_ids is not None
    assert whole.sampling[0].output_ids.tolist() == [41]
    assert second.token_ids.tolist() == [0, 0]


def test_a_worker_does_not_run_what_needs_tokens_it_never_sampled() -> None:
    desk = Desk()
    desk.add(sequence(1, 5))
    first, second = desk.plan(), desk.plan()
    seen: list[StepPlan] = []

    def run(plan: StepPlan) -> StepResult | StepFailed:
        seen.append(plan)
        return StepFailed(plan.step_id, "out_of_memory") if len(seen) == 1 else StepResult(plan.step_id, (SampledToken(7),))

    worker = InOrder(run)
    assert worker(first) == StepFailed(first.step_id, "out_of_memory")
    assert worker(second) == StepFailed(second.step_id, "follows_failed_step")
    worker(first)
    worker(second)
    assert [plan.token_ids.tolist() for plan in seen[2:]] == [[7]]


class Lane:
    """A worker in virtual time: every step takes 20 ms, and they are run one after the other."""

    def __init__(self) -> None:
        self.pid = 0
        self.died = asyncio.Event()
        self.times_s: list[tuple[float, float]] = []  # sent, begun
        self._free_s = 0.0
        self._run = InOrder(lambda plan: StepResult(plan.step_id, tuple(SampledToken(1) for _ in plan.seq_ids), seconds=0.02))

    def send(self, message: Any, timeout_s: float) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        begun_s = max(self._free_s, loop.time())
        self.times_s.append((loop.time(), begun_s))
        self._free_s = begun_s + 0.02
        reply: asyncio.Future[Any] = loop.create_future()
        loop.call_at(self._free_s, reply.set_result, self._run(message))
        return reply


def replica_on(lane: Lane, deliver: Any) -> Replica:
    media = FakeMedia()
    rows: Any = type("Rows", (), {"lookup": staticmethod(media.rows_of)})
    ready = DecoderReady(num_blocks=64, block_size=16, max_model_len=1024, vocab_size=90, hidden_size=8)
    limits = SchedulerLimits(1024, 8, 256)
    now_s = asyncio.get_running_loop().time
    return Replica(
        "small", lane, ready, limits, rows, Metrics(), Records(CostModel()),
        enable_prefix_caching=True, deliver=deliver, want=lambda *_: None, now_s=now_s,
    )  # fmt: skip


def test_a_worker_never_waits_for_its_next_step_and_it_is_planned_late() -> None:
    """Late: who comes while a step runs is in the next one, unless he comes in its last milliseconds."""

    async def serve() -> list[tuple[float, float]]:
        lane, ended = Lane(), asyncio.Event()

        def deliver(updates: list[TokenUpdate]) -> None:
            if any(update.finish_reason for update in updates):
                ended.set()

        replica = replica_on(lane, deliver)
        running = asyncio.create_task(replica.run())
        replica.add(sequence(1, 5, sampling=greedy(max_tokens=60, ignore_eos=True)))
        await ended.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return lane.times_s

    times = run_in_virtual_time(serve())
    learnt = times[30:]
    gaps = np.diff([begun for _, begun in learnt])
    assert gaps == pytest.approx(0.02)
    assert [begun - sent for sent, begun in learnt[1:]] == pytest.approx([0.004] * (len(learnt) - 1), abs=0.002)


def test_a_step_may_take_as_long_as_steps_of_its_size_have_taken_and_a_hang_is_noticed() -> None:
    """A fixed limit of 30 s killed every worker of a 7B decoder on a laptop: a thousand tokens of prompt take it longer."""

    async def serve() -> list[float]:
        lane = Lane()
        limits: list[float] = []
        send = lane.send

        def note(message: Any, timeout_s: float) -> asyncio.Future[Any]:
            limits.append(timeout_s)
            return send(message, timeout_s)

        lane.send = note  # type: ignore[method-assign]
        ended = asyncio.Event()
        replica = replica_on(lane, lambda updates: ended.set() if any(update.finish_reason for update in updates) else None)
        running = asyncio.create_task(replica.run())
        replica.add(sequence(1, 40, sampling=greedy(max_tokens=9, ignore_eos=True)))
        await ended.wait()
        ended.clear()
        replica.add(sequence(2, "x", 200, sampling=greedy(max_tokens=2, ignore_eos=True)))
        await ended.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return limits

    limits = run_in_virtual_time(serve())
    assert limits[0] == limits[-2] == 600.0  # the first step; the first that is twice as large
    assert max(limits[2:9]) < 6.0


def test_a_death_with_two_steps_in_flight_ends_the_replica() -> None:
    async def serve() -> int:
        lane = Lane()
        replica = replica_on(lane, lambda updates: None)
        running = asyncio.create_task(replica.run())
        replica.add(sequence(1, 5, sampling=greedy(max_tokens=60, ignore_eos=True)))
        await asyncio.sleep(0.5)
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        lost.set_exception(WorkerDied("test"))
        lane.send = lambda *_: lost  # type: ignore[method-assign]
        with pytest.raises(WorkerDied):
            await running
        (orphan,) = replica.scheduler.evacuate()
        return orphan.num_worker_deaths

    assert run_in_virtual_time(serve()) == 1


def test_entropy_is_asked_of_the_first_tokens_alone_and_again_after_a_death() -> None:
    desk = Desk()
    each = sequence(1, 5, sampling=greedy(max_tokens=5))
    each.num_judged = 2
    desk.add(each)
    wanted = []
    for _ in range(4):
        plan = desk.plan()
        wanted += [how.entropy for how in plan.sampling if how is not None]
        desk.land(plan)
    assert wanted == [True, True, False, False]
    (orphan,) = desk.scheduler.evacuate()
    del orphan.token_ids[6:]
    again = Desk()
    again.add(orphan)
    (how,) = again.plan().sampling
    assert how is not None
    assert how.entropy
