"""A report as tables for the terminal, and as Markdown.  Pure: both are made of the JSON alone, so that a saved one will do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

Report = Mapping[str, Any]
_COLUMNS = ("items", "GA", "at least", "HOR", "at most", "HRR", "COV", "refused", "yes bias", "unscored", "failed")


@dataclass(frozen=True, slots=True)
class Rows:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def report_tables(report: Report) -> Iterator[Table | Text]:
    for rows in _all_rows(report):
        table = Table(title=rows.title, title_justify="left")
        for index, column in enumerate(rows.header):
            table.add_column(column, justify="right" if index else "left")
        for row in rows.rows:
            table.add_row(*row, style="bold" if row[0] in ("all media", "macro") else None)
        yield table
    for line in remarks(report):
        yield Text(line)
    yield Text(f"gate: {report['gate']['outcome']}", style="bold green" if report["gate"]["outcome"] == "passed" else "bold red")
    for finding in report["gate"]["findings"]:
        yield Text(f"  {finding['text']}")


def markdown_report(report: Report) -> str:
    server, golden = report["server"], report["set"]
    lines = [f"# {golden['name']} on {server['model']}", "", f"{report['date']}, {golden['items']} items in {report['seconds']:.0f} s.", ""]
    lines += [f"**Gate: {report['gate']['outcome']}**", ""] + [f"- {finding['text']}" for finding in report["gate"]["findings"]] + [""]
    for rows in _all_rows(report):
        lines += [f"## {rows.title}", "", _pipes(rows.header), _pipes(["---", *["--:"] * (len(rows.header) - 1)])]
        lines += [*map(_pipes, rows.rows), ""]
    lines += [f"- {line}" for line in remarks(report)]
    return "\n".join(lines).rstrip() + "\n"


def remarks(report: Report) -> Iterator[str]:
    """What stands beside the tables, a sentence each."""
    yield "At least, at most: one-sided 95 % Wilson bounds; items that share a picture or a clip count as one cluster."
    unscored = sum(figures["unscored"] for figures in report["slices"].values())
    if unscored:
        why = "nobody judged them" if report["judge"] is None else "the judge could not tell, or failed"
        yield f"Open answers that are unscored: {unscored}; {why}.  They count neither as right nor as wrong."
    if order := report["order"]:
        yield (
            f"Order probes: {order['right']} of {order['probes']} right in both orders, {order['reversed']} reversed, "
            f"{order['unmoved']} unmoved (the two at most {order['confused']['upper_95']:.3f}), {order['wrong']} otherwise wrong."
        )
    if (states := report["states"]) is None:
        yield "Cold, embedding hit and KV hit were not compared: the server doesn't say where media came from, or none were asked for."
    else:
        yield (
            f"Cold, embedding hit and KV hit: {states['equal']} of {states['probes']} answers equal in all three; "
            f"for {states['proven']} the server confirms all three states."
        )
    if (fidelity := report["fidelity"]) is not None:
        equal = f"{fidelity['equal']} of {fidelity['items']}"
        yield f"Fidelity: {equal} greedy answers are those of transformers running {fidelity['reference']}."
    else:
        yield "Fidelity to a reference pipeline was not measured; a model composed of parts, as the bundled one is, has none."
    if (judge := report["judge"]) is not None:
        yield from _judge_remarks(judge)


def _judge_remarks(judge: Report) -> Iterator[str]:
    claims = ", ".join(f"{count} {ruling}" for ruling, count in judge["claims"].items())
    yield f"Judge: {claims}; supported {_number(judge['supported']['value'])} of the claims it could tell."
    if (calibration := judge.get("calibration")) is None:
        yield "The judge is not calibrated: nobody knows how often it errs."
        return
    kappa, corrected = calibration["kappa"], judge["supported_corrected"]
    yield (
        f"Beside labels: kappa {_number(kappa)}, sensitivity {_number(calibration['sensitivity']['value'])}, "
        f"specificity {_number(calibration['specificity']['value'])}, undecided {_number(calibration['undecided']['value'])}."
    )
    if corrected is None:
        yield "No corrected rate: the judge is no better than a coin."
    else:
        yield f"Supported, corrected for its errors: {corrected['value']:.3f}, at least {corrected['lower_95']:.3f}."


def _all_rows(report: Report) -> Iterator[Rows]:
    slices = [_row(name, figures) for name, figures in report["slices"].items()]
    slices.append(_row("all media", report["all_media"]))
    if (average := report["macro"]) is not None:
        slices.append(("macro", "", f"{average['value']:.3f}", f"{average['lower_95']:.3f}", *[""] * (len(_COLUMNS) - 3)))
    yield Rows("by slice", ("slice", *_COLUMNS), tuple(slices))
    yield Rows("by category", ("slice / category", *_COLUMNS), tuple(_row(name, figures) for name, figures in report["categories"].items()))


def _row(name: str, figures: Report) -> tuple[str, ...]:
    accuracy, objects = figures["grounding_accuracy"], figures["hallucinated_object_rate"]
    return (
        name,
        str(figures["items"]),
        _number(accuracy["value"]),
        _number(accuracy["lower_95"] if accuracy["total"] else None),
        _number(objects["value"]),
        _number(objects["upper_95"] if objects["total"] else None),
        _number(figures["hallucinating_answer_rate"]["value"]),
        _number(figures["coverage"]["value"]),
        _number(figures["refusal_rate"]["value"]),
        "-" if figures["yes_bias"] is None else f"{figures['yes_bias']:+.3f}",
        str(figures["unscored"] or "-"),
        str(figures["failed"] or "-"),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
