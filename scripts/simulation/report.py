"""What came of a simulated run: figures, a table of them, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from scripts.simulation.box import Outcome, Sample
from scripts.simulation.traffic import BLEND

Summary = dict[str, Any]
TIMES = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
BIN_S = 2.0  # of the curves
COLORS = {"text": "#4477aa", "image": "#ee6677", "audio": "#228833", "image_audio": "#aa3377"}


@dataclass(frozen=True, slots=True)
class Slo:
    """What an answer must keep to count as good."""

    ttft_s: float = 0.9
    tpot_s: float = 0.05

    def holds(self, outcome: Outcome) -> bool:
        return outcome.finished and outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s


def summarize(outcomes: Sequence[Outcome], samples: Sequence[Sample], window_s: tuple[float, float], slo: Slo) -> Summary:
    """Figures of requests that arrived within the window, times in ms, rates a second.  Percentiles are of answered ones."""
    start_s, stop_s = window_s
    seconds = stop_s - start_s
    within = [outcome for outcome in outcomes if start_s <= outcome.request.arrival_s < stop_s]
    seen = [sample for sample in samples if start_s <= sample.now_s < stop_s]
    return {
        "num_requests": len(within),
        "offered_rps": len(within) / seconds,
        "answered_rps": sum(outcome.finished for outcome in within) / seconds,
        "goodput_rps": sum(map(slo.holds, within)) / seconds,
        "refused": Counter(outcome.refusal for outcome in within if outcome.refusal),
        "shed_share": sum(outcome.refusal != "" for outcome in within) / max(1, len(within)),
        "tokens_per_s": sum(outcome.num_tokens for outcome in within) / seconds,
        "num_waiting_max": max((sample.num_waiting for sample in seen), default=0),
        "kv_usage_mean": float(np.mean([sample.kv_usage for sample in seen])),
        "kv_usage_max": max((sample.kv_usage for sample in seen), default=0.0),
        "modalities": {
            f"{decoder} {modality}": _latencies(answered)
            for decoder in dict.fromkeys(outcome.decoder for outcome in within)
            for modality in BLEND
            if (answered := [each for each in within if each.finished and (each.decoder, each.request.modality) == (decoder, modality)])
        },
    }


def _latencies(answered: Sequence[Outcome]) -> Summary:
    ttft = np.array([outcome.ttft_s for outcome in answered]) * 1e3
    tpot = np.array([outcome.tpot_s for outcome in answered if outcome.num_tokens > 1] or [0.0]) * 1e3
    return {
        "num_answered": len(answered),
        "ttft_ms_p50": float(np.percentile(ttft, 50)),
        "ttft_ms_p99": float(np.percentile(ttft, 99)),
        "tpot_ms_p50": float(np.percentile(tpot, 50)),
        "tpot_ms_p99": float(np.percentile(tpot, 99)),
    }


def table(summary: Summary, title: str) -> Table:
    caption = (
        f"offered {summary['offered_rps']:.1f}/s, answered {summary['answered_rps']:.1f}/s, goodput {summary['goodput_rps']:.1f}/s, "
        f"shed {summary['shed_share']:.1%}, KV {summary['kv_usage_mean']:.0%} (max {summary['kv_usage_max']:.0%}), "
        f"waiting at most {summary['num_waiting_max']}"
    )
    rows = Table(title=title, caption=caption)
    for heading in ("requests", "answered", "TTFT p50", "p99", "TPOT p50", "p99"):
        rows.add_column(heading, justify="left" if heading == "requests" else "right")
    for name, figures in summary["modalities"].items():
        times = [f"{figures[key]:.1f}" for key in TIMES]
        rows.add_row(name, str(figures["num_answered"]), *times)
    return rows


def isolation(outcomes_of: Mapping[str, Sequence[Outcome]], window_s: tuple[float, float]) -> Summary:
    """What became of text that came within the window in several runs of the same requests; and by how much it was slower in the last."""
    start_s, stop_s = window_s
    figures: Summary = {}
    for name, outcomes in outcomes_of.items():
        text = [each for each in outcomes if each.request.modality == "text" and start_s <= each.request.arrival_s < stop_s]
        figures[name] = _latencies([each for each in text if each.finished]) | {"num_refused": sum(each.refusal != "" for each in text)}
    *others, last = figures
    ratios = {name: {key: figures[last][key] / figures[name][key] for key in TIMES} for name in others}
    return {"runs": figures, "ratios": ratios}


def isolation_table(middle: Summary) -> Table:
    rows = Table("text of the middle third", "answered", "refused", "TTFT p50", "p99", "TPOT p50", "p99")
    for name, figures in middle["runs"].items():
        rows.add_row(name, str(figures["num_answered"]), str(figures["num_refused"]), *(f"{figures[key]:.1f}" for key in TIMES))
    for name, ratios in middle["ratios"].items():
        rows.add_row(f"times {name}", "", "", *(f"{ratios[key]:.2f}" for key in TIMES))
    return rows


def plot(outcomes: Sequence[Outcome], samples: Sequence[Sample], slo: Slo, title: str, path: Path) -> None:
    """Six panels over time, or over requests, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(16, 8), layout="constrained")
    figure.suptitle(title)
    _plot_shares(panels[0, 0], outcomes, "TTFT, ms", lambda outcome: outcome.ttft_s * 1e3, slo.ttft_s * 1e3)
    _plot_shares(
        panels[0, 1], [each for each in outcomes if each.num_tokens > 1], "TPOT, ms", lambda each: each.tpot_s * 1e3, slo.tpot_s * 1e3
    )
    _plot_rates(panels[0, 2], outcomes, slo)
    _plot_ttft_over_time(panels[1, 0], outcomes)
    times = [sample.now_s for sample in samples]
    queue, usage = panels[1, 1], panels[1, 2]
    queue.plot(times, [sample.num_running for sample in samples], label="running", color="#4477aa")
    queue.plot(times, [sample.num_waiting for sample in samples], label="waiting", color="#ee6677")
    _dress(queue, "sequences", "s")
    usage.plot(times, [100 * sample.kv_usage for sample in samples], label="KV cache in use", color="#4477aa")
    usage.set_ylim(0, 100)
    _dress(usage, "%, mean over replicas", "s")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _plot_shares(panel: Any, outcomes: Sequence[Outcome], label: str, value: Any, limit: float) -> None:
    """How many of a modality's answers are at most so late, to the 99.9th percentile."""
    for modality, color in COLORS.items():
        values = np.sort([value(outcome) for outcome in outcomes if outcome.finished and outcome.request.modality == modality])
        if len(values):
            panel.plot(values, np.arange(1, len(values) + 1) / len(values), label=modality, color=color)
    panel.axvline(limit, color="black", linestyle=":", label="limit")
    panel.set_ylim(0, 1)
    _dress(panel, "share of answers", label)


def _plot_rates(panel: Any, outcomes: Sequence[Outcome], slo: Slo) -> None:
    for label, chosen, color in (
        ("offered", outcomes, "#bbbbbb"),
        ("refused", [outcome for outcome in outcomes if outcome.refusal], "#ee6677"),
        ("good", [outcome for outcome in outcomes if slo.holds(outcome)], "#228833"),
    ):
        arrivals = [outcome.request.arrival_s for outcome in chosen]
        counts, edges = np.histogram(arrivals, bins=_bins(outcomes))
        panel.stairs(counts / BIN_S, edges, label=label, color=color, linewidth=4 if label == "offered" else 1.5)
    _dress(panel, "requests a second, by arrival", "s")


def _plot_ttft_over_time(panel: Any, outcomes: Sequence[Outcome]) -> None:
    bins = _bins(outcomes)
    for modality, color in COLORS.items():
        answered = [outcome for outcome in outcomes if outcome.finished and outcome.request.modality == modality]
        where = np.digitize([outcome.request.arrival_s for outcome in answered], bins)
        ttft = np.array([outcome.ttft_s for outcome in answered]) * 1e3
        medians = [np.median(ttft[where == i]) if (where == i).any() else np.nan for i in range(1, len(bins))]
        panel.plot(bins[:-1], medians, label=modality, color=color)
    _dress(panel, f"median TTFT of {BIN_S:g} s, ms", "s")


def _bins(outcomes: Sequence[Outcome]) -> np.ndarray:
    last_s = max((outcome.request.arrival_s for outcome in outcomes), default=0.0)
    return np.arange(0.0, last_s + 2 * BIN_S, BIN_S)


def _dress(panel: Any, y: str, x: str) -> None:
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    panel.legend()
