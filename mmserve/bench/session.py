"""One run: prepare everything, warm up, start the clock, count."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmserve.bench.client import EndpointError, LoadClient, Outcome
from mmserve.bench.content import Content, request_bodies
from mmserve.bench.statistics import by_modality, per_request, summarize
from mmserve.bench.traffic import PlannedRequest, Traffic, plan_requests

_WARMUP_SEED_STEP = 1_000_003  # so that what warms the server up is not in its caches for the run


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a run is made and what is counted of it."""

    max_concurrency: int | None
    num_warmups: int
    percentiles: Sequence[float]
    goodput: Mapping[str, float]  # metric -> bound in milliseconds


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: Sequence[Outcome]
    duration_s: float


async def run_load(
    client: LoadClient,
    planned: tuple[PlannedRequest, ...],
    content: Content,
    model: str,
    measurement: Measurement,
    on_outcome: Callable[[Outcome], None],
) -> Run:
    """Warm the server up, then put the planned load on it.  Raises EndpointError if no warm-up request is answered."""
    warmups = tuple(replace(request, arrival_s=0.0) for request in planned[: measurement.num_warmups])
    # Drawing media takes seconds, and a loop that stands still for them would drop the connections it holds.
    warmup_bodies = await asyncio.to_thread(request_bodies, warmups, replace(content, seed=content.seed + _WARMUP_SEED_STEP), model)
    bodies = await asyncio.to_thread(request_bodies, planned, content, model)
    warm, _ = await client.run(warmups, warmup_bodies, max_concurrency=measurement.max_concurrency)
    if warm and all(outcome.failure for outcome in warm):
        raise EndpointError(f"no warm-up request was answered; the first failed with {warm[0].failure}: {warm[0].error}")
    outcomes, duration_s = await client.run(planned, bodies, max_concurrency=measurement.max_concurrency, on_outcome=on_outcome)
    return Run(outcomes, duration_s)


async def measure(
    client: LoadClient, traffic: Traffic, content: Content, model: str, measurement: Measurement, on_outcome: Callable[[Outcome], None]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The result of a run, and what each request of it saw.  Raises EndpointError."""
    run = await run_load(client, plan_requests(traffic), content, model, measurement, on_outcome)
    how: dict[str, Any] = {"percentiles": measurement.percentiles, "goodput": measurement.goodput}
    result = {
        "model_id": model,
        "num_prompts": traffic.num_prompts,
        "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": measurement.max_concurrency,
        "repeat_rate": traffic.repeat_rate,
        "seed": traffic.seed,
        **summarize(run.outcomes, run.duration_s, **how),
        "by_modality": by_modality(run.outcomes, run.duration_s, **how),
    }
    return result, per_request(run.outcomes)
