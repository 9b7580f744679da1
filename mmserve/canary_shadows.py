"""Questions that a canary answers for nobody, after a client has had its answer from the decoder beside it, and when nobody waits."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from mmserve.active_request import ActiveRequest
from mmserve.background import BackgroundTasks
from mmserve.canary import Arm
from mmserve.errors import MmserveError
from mmserve.metrics import Metrics
from mmserve.request import ChatRequest
from mmserve.tenants import TIERS

log = logging.getLogger(__name__)

MAX_SHADOWS = 4  # at once
SHADOW, TENANT = "shadow", "canary"
SHORT_ANSWER = 16  # tokens: a greedy answer no longer than this is a choice, and equal or not


class Shadows:
    """Owned by the event loop.  `submit(request, why, arm)` accepts a request for nobody; `note` hears whether short answers are equal.

    Its length is the number that run.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool],
        submit: Callable[[ChatRequest, str, Arm], Awaitable[ActiveRequest]],
        note: Callable[[Arm, bool], None],
        metrics: Metrics,
    ) -> None:
        self._is_idle = is_idle
        self._submit = submit
        self._note = note
        self._outcomes = metrics.canary_shadows
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._tasks)

    def offer(self, active: ActiveRequest, arm: Arm, texts: Sequence[str], *, is_free: bool) -> None:
        """A request has ended with these answers.  `is_free`: nobody waits for the canary."""
        if not (is_free and self._is_idle()) or len(self._tasks) >= MAX_SHADOWS:
            self._outcomes.labels(arm.canary, "busy").inc()
            return
        sampling = replace(active.request.sampling, seed=active.seed)
        request = replace(
            active.request, model=arm.canary, tenant=TENANT, priority=TIERS["batch"], request_id="", guardrail="off",
            allow_degraded=False, sampling=sampling,
        )  # fmt: skip
        is_comparable = sampling.temperature == 0 and active.generated_tokens <= SHORT_ANSWER * sampling.n
        work = self._run(request, replace(arm, is_canary=True), texts if is_comparable else None)
        self._tasks.start(work, f"shadow-{active.generation.request_id}")

    def cancel(self) -> None:
        self._tasks.cancel()

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self, request: ChatRequest, arm: Arm, texts: Sequence[str] | None) -> None:
        try:
            shadow = await self._submit(request, SHADOW, arm)
        except MmserveError as error:
            log.info("canary=%s shadow left out code=%s", arm.canary, error.code)
            self._outcomes.labels(arm.canary, "refused").inc()
            return
        said = [""] * request.sampling.n
        try:
            async for delta in shadow.generation:
                said[delta.index] += delta.text
        except MmserveError:
            self._outcomes.labels(arm.canary, "failed").inc()
            return
        finally:
            shadow.generation.cancel()
        if texts is None:
            self._outcomes.labels(arm.canary, "answered").inc()
            return
        is_equal = [text.split() for text in texts] == [text.split() for text in said]
        self._outcomes.labels(arm.canary, "equal" if is_equal else "different").inc()
        self._note(arm, is_equal)
