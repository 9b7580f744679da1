"""What pictures cost those who sent none: text alone, then the same arrivals of text under a burst of pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmserve.bench.client import LoadClient, Outcome
from mmserve.bench.content import Content
from mmserve.bench.session import Measurement, run_load
from mmserve.bench.statistics import by_modality
from mmserve.bench.traffic import Modality, PlannedRequest, Traffic, plan_requests

COMPARED = ("median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms")


def plan_burst(traffic: Traffic, burst_rate: float) -> tuple[tuple[PlannedRequest, ...], tuple[PlannedRequest, ...]]:
    """Text alone, and the same text with pictures at `burst_rate` a second for as long as it arrives.  `traffic.mix` is not used.

    `traffic.request_rate` must be finite: a burst beside text that comes all at once would last no time.
    """
    text = plan_requests(replace(traffic, mix={Modality.TEXT: 1.0}))
    num_pictures = max(1, round(burst_rate * text[-1].arrival_s))
    burst = replace(traffic, mix={Modality.IMAGE: 1.0}, num_prompts=num_pictures, request_rate=burst_rate, burstiness=1.0, repeat_rate=0.0)
    together = sorted([*text, *plan_requests(burst)], key=lambda request: request.arrival_s)
    return text, tuple(together)


async def measure_isolation(
    client: LoadClient,
    traffic: Traffic,
    burst_rate: float,
    content: Content,
    model: str,
    measurement: Measurement,
    on_outcome: Callable[[Outcome], None],
) -> dict[str, Any]:
    """`text_alone`, `image_burst` (results by modality) and `comparison`.  Raises EndpointError."""
    alone, together = plan_burst(traffic, burst_rate)
    results = []
    # Other words in the second run: else the prefix cache would know them and flatter it.
    for planned, seed in ((alone, content.seed), (together, content.seed + 1)):
        run = await run_load(client, planned, replace(content, seed=seed), model, measurement, on_outcome)
        results.append(by_modality(run.outcomes, run.duration_s, percentiles=(99, *measurement.percentiles), goodput=measurement.goodput))
    first, second = results
    comparison = compare(first[Modality.TEXT], second[Modality.TEXT], COMPARED)
    return {"model_id": model, "burst_rate": burst_rate, "text_alone": first, "image_burst": second, "comparison": comparison}


def compare(alone: Mapping[str, Any], burst: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Both figures of each name and their ratio; a ratio is None where a figure is, or where the first is 0."""
    return {
        name: {
            "alone": alone[name],
            "burst": burst[name],
            "ratio": burst[name] / alone[name] if alone[name] and burst[name] is not None else None,
        }
        for name in names
    }
