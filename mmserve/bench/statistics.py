"""Outcomes to figures, under the names of vLLM's `bench serve`.  Pure.

Times are in milliseconds where a name ends in _ms, else in seconds; a percentile is interpolated as numpy's default does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmserve.bench.client import Outcome
from mmserve.bench.traffic import Modality

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def summarize(
    outcomes: Sequence[Outcome], duration_s: float, *, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """The result of a run.  `goodput` bounds some of GOODPUT_METRICS, in milliseconds; empty: `request_goodput` is None."""
    answered = [outcome for outcome in outcomes if outcome.failure is None]
    total_input = sum(outcome.input_tokens for outcome in answered)
    total_output = sum(outcome.output_tokens for outcome in answered)
    result = {
        "duration": duration_s,
        "completed": len(answered),
        "failed": len(outcomes) - len(answered),
        "failures": dict(Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)),
        "without_usage": sum(not outcome.has_usage for outcome in answered),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(answered) / duration_s,
        "request_goodput": sum(is_good(outcome, goodput) for outcome in answered) / duration_s if goodput else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_output_tokens_per_s": peak_rate(answered),
        "max_concurrent_requests": peak_concurrency(answered),
    }
    for metric in METRICS:
        result |= spread(metric, [value for outcome in answered for value in times_ms(outcome, metric)], percentiles)
    return result


def by_modality(outcomes: Sequence[Outcome], duration_s: float, **how: Any) -> dict[str, dict[str, Any]]:
    """A result for each modality that was sent."""
    sent = {outcome.modality for outcome in outcomes}
    return {
        modality.value: summarize([outcome for outcome in outcomes if outcome.modality is modality], duration_s, **how)
        for modality in Modality
        if modality in sent
    }


def per_request(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """What each request saw, in order of arrival: seconds and tokens."""
    return {
        "input_lens": [outcome.input_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itl_s for outcome in outcomes],
        "latencies": [outcome.latency_s for outcome in outcomes],
        "start_times": [outcome.start_s for outcome in outcomes],
        "queue_times": [outcome.queue_s for outcome in outcomes],
        "modalities": [outcome.modality.value for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def times_ms(outcome: Outcome, metric: str) -> list[float]:
    """What one answer adds to a metric: a gap after each piece for itl, at most one value for the others."""
    match metric:
        case "ttft":
            return [outcome.ttft_s * 1000]
        case "tpot":
            return [] if outcome.tpot_s is None else [outcome.tpot_s * 1000]
        case "itl":
            return [gap * 1000 for gap in outcome.itl_s]
        case "e2el":
            return [outcome.latency_s * 1000]
    raise KeyError(metric)


def spread(metric: str, values_ms: Sequence[float], percentiles: Iterable[float]) -> dict[str, float | None]:
    """`mean_ttft_ms`, `median_ttft_ms`, `std_ttft_ms`, `p99_ttft_ms` ...; None where nothing was measured."""
    ranks = {"median": 50.0} | {f"p{rank:g}": rank for rank in percentiles}
    if not values_ms:
        return dict.fromkeys(f"{name}_{metric}_ms" for name in ("mean", "std", *ranks))
    figures = {"mean": float(np.mean(values_ms)), "std": float(np.std(values_ms))}
    figures |= {name: float(np.percentile(values_ms, rank)) for name, rank in ranks.items()}
    return {f"{name}_{metric}_ms": value for name, value in figures.items()}


def is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Answered within every bound; an answer of one token keeps any tpot."""
    return all(value <= goodput[metric] for metric in goodput for value in times_ms(outcome, metric))


def peak_rate(answered: Sequence[Outcome]) -> float:
    """Pieces of text in the fullest second of the run; seconds begin when the first request is sent."""
    if not answered:
        return 0.0
    start = min(outcome.start_s for outcome in answered)
    times = [np.cumsum([outcome.start_s - start + outcome.ttft_s, *outcome.itl_s]) for outcome in answered]
    return float(np.bincount(np.concatenate(times).astype(np.int64)).max())


def peak_concurrency(answered: Sequence[Outcome]) -> int:
    """Most requests under way at one time; one that ends as another starts doesn't overlap it."""
    changes = sorted(change for outcome in answered for change in ((outcome.start_s, 1), (outcome.start_s + outcome.latency_s, -1)))
    return int(np.cumsum([step for _, step in changes]).max(initial=0))
