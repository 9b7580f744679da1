"""What routing is worth: accuracy and cost of every policy over the same held-out questions, and how long a decision takes.

    python -m scripts.routing.outcomes --first-seed 1079741824 --items 800 --out held-out.jsonl.gz     asks both decoders
    python -m scripts.measure_router held-out.jsonl.gz --plot curve.png --live 200                     compares policies

Policies are compared over answers that both decoders gave; an escalated answer is counted with all that the small one's cost, which is a
little more than it takes.  `--live` asks a server of its own `auto`, to see that what was computed comes true.  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mmserve.composition import BUNDLED
from mmserve.evals.intervals import wilson
from mmserve.model_router import choose_model
from mmserve.route_classifier import FILE, RouteClassifier
from scripts.loopback import client, server
from scripts.routing.outcomes import HELD_OUT_SEED, Outcome, ask_each, read_outcomes
from scripts.tiny.score import sample_items
from scripts.train_router import asked_of, doubts

SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # of the questions, the most promising first
BOTH = ("small", "large")


@dataclass(frozen=True, slots=True)
class Point:
    """What a policy comes to."""

    policy: str
    items: int
    right: int
    usd_per_1000: float
    share_large: float  # of the answers

    def figures(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "accuracy": round(self.right / self.items, 4),
            "accuracy_95": [round(wilson(self.right / self.items, self.items, side), 4) for side in (-1, 1)],
            "usd_per_1000": round(self.usd_per_1000, 5),
            "share_large": round(self.share_large, 4),
        }


class Held:
    """Held-out questions with both decoders' answers, as columns."""

    def __init__(self, outcomes: Sequence[Outcome], classifier: RouteClassifier) -> None:
        self.right = {name: np.array([each.attempts[name].right for each in outcomes]) for name in BOTH}
        self.usd = {name: np.array([each.attempts[name].usd for each in outcomes]) for name in BOTH}
        self.gain = np.array([classifier.gain(asked_of(each)) for each in outcomes])
        self.doubt = doubts(outcomes, max(1, classifier.num_judged))

    def point(self, policy: str, routed: np.ndarray, escalated: np.ndarray) -> Point:
        """Of asking the large decoder where `routed`, and else the small one and again the large one where `escalated` (bool [N])."""
        escalated = escalated & ~routed
        is_large = routed | escalated
        usd = np.where(is_large, self.usd["large"], self.usd["small"]) + np.where(escalated, self.usd["small"], 0.0)
        right = np.where(is_large, self.right["large"], self.right["small"])
        return Point(policy, len(right), int(right.sum()), 1000 * float(usd.mean()), float(is_large.mean()))

    def curve(self, policy: str, scores: np.ndarray, *, escalates: bool) -> list[Point]:
        """With the questions of the highest scores given to the large decoder, more and more of them."""
        order, points = np.argsort(-scores, kind="stable"), []
        for share in SHARES:
            chosen = np.zeros(len(scores), bool)
            chosen[order[: round(share * len(scores))]] = True
            nobody = np.zeros_like(chosen)
            points.append(self.point(f"{policy} {share:.0%}", *((nobody, chosen) if escalates else (chosen, nobody))))
        return points


def policies(held: Held, classifier: RouteClassifier) -> tuple[list[Point], list[Point], list[Point]]:
    """Single ones, and the curves of the classifier and of escalation."""
    nobody = np.zeros(len(held.gain), bool)
    escalated = held.doubt > classifier.escalate_above if classifier.escalate_above is not None else nobody
    routed = held.gain >= classifier.threshold
    single = [
        held.point("all small", nobody, nobody),
        held.point("all large", ~nobody, nobody),
        held.point("classifier", routed, nobody),
        held.point("escalation", nobody, escalated),
        held.point("classifier + escalation (auto)", routed, escalated),
        held.point("oracle", held.right["large"] & ~held.right["small"], nobody),
    ]
    return single, held.curve("classifier", held.gain, escalates=False), held.curve("escalation", held.doubt, escalates=True)


def decision_us(outcomes: Sequence[Outcome], classifier: RouteClassifier) -> dict[str, float]:
    """Microseconds of a decision, features and all."""
    asked, waiting, times = [asked_of(each) for each in outcomes], {"small": 1, "large": 2}, []
    for each in asked * max(1, 5000 // len(asked)):
        began = time.perf_counter()
        choose_model(
            "auto",
            served_name="",
            available=BOTH,
            capable=BOTH,
            asked=each,
            classifier=classifier,
            tier="standard",
            waiting=waiting,
            canaries=(),
        )
        times.append(1e6 * (time.perf_counter() - began))
    return {f"p{share}": round(float(np.percentile(times, share)), 1) for share in (50, 99)}


async def ask_live(model: Path, num_items: int, concurrency: int) -> dict[str, Any]:
    """What `auto` does on a real server."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mmserve-router-") as scratch:
        async with server(Path(scratch), "--model", str(model)) as url, client(url) as openai:
            await ask_each(openai, sample_items(num_items, HELD_OUT_SEED), ("auto",), concurrency, found.append)
    attempts = [each.attempts["auto"] for each in found]
    return {
        "items": len(attempts),
        "accuracy": round(sum(each.right for each in attempts) / len(attempts), 4),
        "usd_per_1000": round(1000 * sum(each.usd for each in attempts) / len(attempts), 5),
        "reasons": dict(Counter(each.reason for each in attempts)),
    }


def draw(path: Path, single: Sequence[Point], curves: dict[str, Sequence[Point]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (name, points), color in zip(curves.items(), ("#4477aa", "#cc6677"), strict=True):
        x, y = [each.usd_per_1000 for each in points], [100 * each.right / each.items for each in points]
        axes.plot(x, y, "o-", color=color, label=f"{name}, more and more to large", markersize=3)
    for point, marker in zip(single, "osv^*D", strict=True):
        y = 100 * point.right / point.items
        low, high = (100 * wilson(point.right / point.items, point.items, side) for side in (-1, 1))
        spread = [[y - low], [high - y]] if point.policy in ("all small", "all large") else None
        axes.errorbar([point.usd_per_1000], [y], spread, fmt=marker, color="black", capsize=3, markersize=7, label=point.policy, alpha=0.7)
    axes.set_xlabel("USD per 1,000 requests (each worker at the default price of a GPU)")
    axes.set_ylabel("right answers, %")
    axes.set_title(f"Cost and quality over {single[0].items} held-out questions")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def table(points: Sequence[Point]) -> Table:
    shown = Table(title="policies")
    for column in ("policy", "right", "95 %", "USD/1000", "to large"):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for point in points:
        figures = point.figures()
        low, high = figures["accuracy_95"]
        shown.add_row(
            point.policy, f"{figures['accuracy']:.3f}", f"{low:.3f}-{high:.3f}", f"{point.usd_per_1000:.4f}", f"{point.share_large:.1%}"
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, help="of both decoders, from scripts.routing.outcomes, with other seeds than were trained on")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="directory whose decoders answered, with its router.json")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument("--live", type=int, default=0, metavar="N", help="ask a server of its own the first N questions with model auto")
    parser.add_argument("--concurrency", type=int, default=6)
    options = parser.parse_args()
    classifier = RouteClassifier.read(options.model / FILE)
    if classifier is None:
        parser.error(f"there is no {options.model / FILE}")
    outcomes = read_outcomes(options.answers)
    single, by_gain, by_doubt = policies(Held(outcomes, classifier), classifier)
    Console(width=110).print(table([*single, *by_gain, *by_doubt]))
    if options.plot:
        draw(options.plot, single, {"classifier": by_gain, "escalation": by_doubt})
    report = {
        "script": "measure_router",
        "items": len(outcomes),
        "policies": [point.figures() for point in single],
        "curves": {"classifier": [point.figures() for point in by_gain], "escalation": [point.figures() for point in by_doubt]},
        "decision_us": decision_us(outcomes, classifier),
    }
    if options.live:
        report["live"] = asyncio.run(ask_live(options.model, options.live, options.concurrency))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
