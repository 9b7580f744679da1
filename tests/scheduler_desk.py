"""A scheduler and its worker, stepped by hand."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from kv_world import FakeMedia, FakeWorker

from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.plan import SampledToken, StepFailed, StepPlan, StepResult
from mmserve.request import SamplingParams
from mmserve.scheduler.cost_model import Coefficients, CostModel, shape_of
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import Scheduler, TokenUpdate
from mmserve.scheduler.sequence import Sequence


class Desk:
    """A scheduler with its worker, stepped by hand; `check` after everything."""

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        tpot_target_ms: float = math.inf,
        costs: CostModel | None = None,
    ) -> None:
        self.media = FakeMedia()
        self.records = Records(costs or CostModel())
        self.kv = KVCacheManager(num_blocks, block_size)
        limits = SchedulerLimits(4096, max_num_seqs, max_num_batched_tokens, tpot_target_ms)
        self.scheduler = Scheduler(limits, self.kv, self.media.rows_of, self.records)
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

    def land(self, plan: StepPlan, stale: Collection[int] = ()) -> list[TokenUpdate]:
        result = self.worker.run(plan, self.truth, stale)
        assert isinstance(result, StepResult)
        updates = self.scheduler.apply(result, self.now_s)
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


def stopwatch(plan: StepPlan, true: Coefficients) -> StepResult:
    """What a device that takes `true` time and says nothing but ones would answer."""
    starts, stops = plan.context_lens - np.diff(plan.query_starts), plan.context_lens
    shape = shape_of(zip(starts.tolist(), stops.tolist(), strict=True))
    tokens = tuple(SampledToken(1) if wants else None for wants in plan.wants_token.tolist())
    return StepResult(plan.step_id, tokens, seconds=CostModel(true).step_ms(shape) / 1e3)
