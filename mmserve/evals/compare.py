"""Two runs over the same items, pair by pair: what got better, what got worse, and whether chance explains it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from mmserve.evals.golden import SLICES
from mmserve.evals.intervals import mcnemar
from mmserve.evals.report import FORMAT


class BadReport(Exception):
    """A file is no report of `mmserve eval --json`, or two of them have nothing in common."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one slice, over the items that both runs scored."""

    items: int
    right_before: int
    right_after: int
    better: tuple[str, ...]  # ids: wrong before, right after
    worse: tuple[str, ...]

    @property
    def p_value(self) -> float:
        """McNemar's exact test, two-sided.  It takes the pairs for independent, which items that share a picture aren't quite."""
        return mcnemar(len(self.better), len(self.worse))

    def as_json(self) -> dict[str, Any]:
        shares = {"before": round(self.right_before / self.items, 5), "after": round(self.right_after / self.items, 5)}
        return {"items": self.items, **shares, "better": list(self.better), "worse": list(self.worse), "p_value": self.p_value}


def load_report(path: Path) -> dict[str, Any]:
    """Raises BadReport."""
    try:
        report = orjson.loads(path.read_bytes())
    except OSError as error:
        raise BadReport(f"can't read {path}: {error.strerror}") from None
    except orjson.JSONDecodeError:
        raise BadReport(f"{path} is not JSON") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise BadReport(f"{path} is not a report of `mmserve eval --json`")
    return report


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Comparison]:
    """By slice, and "all", over the items that both runs have and scored.  Raises BadReport if there are none, or they aren't the same."""
    old = {answer["id"]: answer for answer in before["answers"]}
    pairs = [
        (old[answer["id"]], answer)
        for answer in after["answers"]
        if answer["id"] in old and None not in (answer["grounded"], old[answer["id"]]["grounded"])
    ]
    if not pairs:
        raise BadReport("the two runs have no scored item in common")
    changed = [b["id"] for a, b in pairs if a["question"] != b["question"] or a["slice"] != b["slice"]]
    if changed:
        raise BadReport(f"the two runs asked different things under one id: {changed[0]}")
    groups = {name: [pair for pair in pairs if pair[1]["slice"] == name] for name in SLICES} | {"all": pairs}
    return {name: _compared(some) for name, some in groups.items() if some}


def comparison_table(comparisons: Mapping[str, Comparison]) -> Table:
    table = Table(title="after beside before")
    table.add_column("slice")
    for column in ("items", "before", "after", "better", "worse", "p (McNemar)"):
        table.add_column(column, justify="right")
    for name, c in comparisons.items():
        shares = f"{c.right_before / c.items:.3f}", f"{c.right_after / c.items:.3f}"
        style = "bold red" if c.p_value < 0.05 and len(c.worse) > len(c.better) else None
        table.add_row(name, str(c.items), *shares, str(len(c.better)), str(len(c.worse)), f"{c.p_value:.4f}", style=style)
    return table


def _compared(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Comparison:
    return Comparison(
        items=len(pairs),
        right_before=sum(a["grounded"] for a, _ in pairs),
        right_after=sum(b["grounded"] for _, b in pairs),
        better=tuple(b["id"] for a, b in pairs if b["grounded"] and not a["grounded"]),
        worse=tuple(b["id"] for a, b in pairs if a["grounded"] and not b["grounded"]),
    )
