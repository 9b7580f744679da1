"""What a worker remembers from one step to the next: the tokens that the last one sampled."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.plan import FOLLOWS_FAILED_STEP, SampledToken, StepFailed, StepPlan, StepResult


class InOrder:
    """Runs plans, each one completed by what the one before it sampled."""

    def __init__(self, run: Callable[[StepPlan], StepResult | StepFailed]) -> None:
        self._run = run
        self._sampled: tuple[SampledToken | None, ...] | None = None  # None after a step that failed, and at the start

    def __call__(self, plan: StepPlan) -> StepResult | StepFailed:
        if self._sampled is None and plan.sampled_by.max() >= 0:
            return StepFailed(plan.step_id, FOLLOWS_FAILED_STEP)
        result = self._run(plan.completed(self._sampled or ()))
        self._sampled = result.tokens if isinstance(result, StepResult) else None
        return result
