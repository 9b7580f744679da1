"""A result as text: the block that vLLM's `bench serve` prints, a table by modality, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from mmserve.bench.statistics import METRICS

_WIDTH = 50


def result_block(result: Mapping[str, Any], *, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The block with vLLM's line names, so that what reads theirs reads ours."""
    return "\n".join(_lines(result, metrics, percentiles))


def modality_table(results: Mapping[str, Mapping[str, Any]], percentiles: Sequence[float]) -> Table:
    """A row for each modality, times in milliseconds."""
    table = Table(title="By modality (ms)", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("modality")
    ranks = [(metric, label) for metric in ("ttft", "tpot", "itl") for label in ("median", *(f"p{rank:g}" for rank in percentiles))]
    for heading in ("answered", "failed", *(f"{metric.upper()} {label}" for metric, label in ranks)):
        table.add_column(heading, justify="right")
    for modality, result in results.items():
        times = (_number(result[f"{label}_{metric}_ms"]) for metric, label in ranks)
        table.add_row(modality, str(result["completed"]), str(result["failed"]), *times)
    return table


def isolation_table(comparison: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Text alone beside the same arrivals of text among pictures; the last column is what the pictures cost."""
    table = Table(title="Text under an image burst", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("alone (ms)", "burst (ms)", "ratio"):
        table.add_column(heading, justify="right")
    for name, figures in comparison.items():
        table.add_row(name, _number(figures["alone"]), _number(figures["burst"]), _number(figures["ratio"]))
    return table


def _lines(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> Iterator[str]:
    yield " Serving Benchmark Result ".center(_WIDTH, "=")
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    for failure, count in result["failures"].items():
        yield _line(f"  {failure}:", count)
    if result["max_concurrency"] is not None:
        yield _line("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        yield _line("Request rate configured (RPS):", result["request_rate"])
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    if result["without_usage"]:
        yield _line("Answers without usage, counted by chunk:", result["without_usage"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _line("Request goodput (req/s):", result["request_goodput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])
    for metric in metrics:
        yield METRICS[metric].center(_WIDTH, "-")
        for label, key in (("Mean", "mean"), ("Median", "median"), *((f"P{rank:g}", f"p{rank:g}") for rank in percentiles)):
            yield _line(f"{label} {metric.upper()} (ms):", result[f"{key}_{metric}_ms"])
    yield "=" * _WIDTH


def _line(name: str, value: float | None) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {_number(value):<10}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
