"""Times the scheduler alone: planning a step and taking in its result, with many sequences running and many more waiting.

    python -m scripts.time_planning [--running 256] [--waiting 512] [--tenants 30]

No worker, no torch.  CPU milliseconds of this process, medians over 200 steps.  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array

import numpy as np

from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.plan import SampledToken, StepPlan, StepResult
from mmserve.request import SamplingParams
from mmserve.scheduler.cost_model import CostModel, shape_of
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import Scheduler
from mmserve.scheduler.sequence import Sequence

NUM_PROMPT = 600
NUM_STEPS = 200
MAX_MODEL_LEN = 8192


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--running", type=int, default=256)
    options.add_argument("--waiting", type=int, default=512)
    options.add_argument("--tenants", type=int, default=30)
    args = options.parse_args()
    limits = SchedulerLimits(MAX_MODEL_LEN, args.running, args.running * NUM_PROMPT, tpot_target_ms=35.0)
    kv = KVCacheManager(args.running * MAX_MODEL_LEN // 16, 16)
    scheduler = Scheduler(limits, kv, lambda _: None, Records())
    for i in range(args.running):
        scheduler.add(_sequence(i, args.tenants))
    _step(scheduler)
    decode_only = [_step(scheduler) for _ in range(NUM_STEPS)]
    for i in range(args.waiting):
        scheduler.add(_sequence(args.running + i, args.tenants))
    with_queue = [_step(scheduler) for _ in range(NUM_STEPS)]
    figures = {"running": scheduler.num_running, "waiting": scheduler.num_waiting}
    for name, steps in (("", decode_only), ("_with_queue", with_queue)):
        for verb, times in zip(("plan", "apply"), zip(*steps, strict=True), strict=True):
            figures[f"{verb}{name}_ms"] = round(statistics.median(times), 3)
    print(json.dumps(figures))


def _sequence(seq_id: int, num_tenants: int) -> Sequence:
    """No two share a prefix; answers never end."""
    token_ids = array("i", [seq_id, *range(NUM_PROMPT - 1)])
    return Sequence(seq_id, token_ids, SamplingParams(temperature=0.0), arrival_s=float(seq_id), tenant=f"tenant {seq_id % num_tenants}")


def _step(scheduler: Scheduler) -> tuple[float, float]:
    """Milliseconds for the plan and what it waits for, and for the result."""
    start_s = time.process_time()
    plan = scheduler.schedule(now_s=0.0)
    scheduler.wanted_media()
    planned_s = time.process_time()
    assert plan is not None
    result = _result(plan)
    resumed_s = time.process_time()
    scheduler.apply(result, now_s=0.0)
    return (planned_s - start_s) * 1e3, (time.process_time() - resumed_s) * 1e3


def _result(plan: StepPlan) -> StepResult:
    """A device that takes the time it was thought to take."""
    starts = plan.context_lens - np.diff(plan.query_starts)
    shape = shape_of(zip(starts.tolist(), plan.context_lens.tolist(), strict=True))
    tokens = tuple(SampledToken(1) if wants else None for wants in plan.wants_token.tolist())
    return StepResult(plan.step_id, tokens, seconds=CostModel().step_ms(shape) / 1e3)


if __name__ == "__main__":
    main()
