"""A report as one HTML page that needs nothing else: figures, and what went wrong with the pictures and clips it went wrong on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from mmserve.evals.endpoint import data_uri
from mmserve.evals.golden import MEDIA_SLICES, Item, Media
from mmserve.evals.probes import OrderResult, swapped
from mmserve.evals.report_text import remarks
from mmserve.evals.scoring import Claim, Scored, score
from mmserve.evals.session import Evaluation

MAX_CARDS = 400  # pictures and clips are in the page itself
_TEMPLATE = Path(__file__).parent / "report.html.jinja"


@dataclass(frozen=True, slots=True)
class Card:
    """One thing to look at."""

    id: str
    slice_name: str
    category: str
    fault: str  # wrong, hallucinated, no answer, unscored or order
    parts: tuple[dict[str, str], ...]  # {"text": ...}, {"image": data URI} or {"audio": data URI}
    answer: str
    expected: tuple[str, ...]
    hallucinated: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    note: str = ""

    @property
    def asks_first(self) -> bool:
        """Whether the question stands before what it asks about, which some models find harder."""
        return "text" in self.parts[0] and len(self.parts) > 1


def html_report(report: dict[str, Any], evaluation: Evaluation) -> str:
    """`report` is that of the evaluation.

    Reads the media of what failed; of more than MAX_CARDS the first, and the page says how many there are.
    """
    faults = list(_faults(evaluation))
    cards = [_card(*fault) for fault in faults[:MAX_CARDS]]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(
        report=report,
        remarks=list(remarks(report)),
        cards=cards,
        num_faults=len(faults),
        tallies=_tallies(cards),
        rows=[*report["slices"].items(), ("all media", report["all_media"])],
        media_slices=MEDIA_SLICES,
    )


Fault = tuple[str, Item, Scored | None, str]  # kind of fault, what was asked, its score, a note


def _faults(evaluation: Evaluation) -> Iterator[Fault]:
    """The wrong before the unscored, in the set's order; then what only the probes found."""
    for answer in evaluation.answers:
        if answer.error is not None and answer.is_right is False:
            yield "no answer", answer.item, answer, answer.error
        elif answer.hallucinated:
            yield "hallucinated", answer.item, answer, ""
        elif answer.is_right is False:
            yield "wrong", answer.item, answer, ""
    for probe in evaluation.order:
        turned = score(swapped(probe.item), probe.cluster, probe.swapped_answer, evaluation.golden.vocabulary)
        # What is merely wrong in the set's own order stands above.
        if probe.result in (OrderResult.REVERSED, OrderResult.UNMOVED) or not turned.is_right:
            right = " or ".join(map(repr, probe.item.expected))
            yield "order", turned.item, turned, f"{probe.result}; in the other order it said {probe.answer!r}, where {right} is right"
    for state in evaluation.states or ():
        if not state.is_equal:
            note = "; ".join(f"{name}: {text!r}" for name, text in state.answers.items())
            yield "states", state.item, None, state.error or note
    for answer in evaluation.answers:
        if answer.is_right is None:
            yield "unscored", answer.item, answer, answer.error or ""


def _card(fault: str, item: Item, scored: Scored | None, note: str) -> Card:
    return Card(
        id=item.id,
        slice_name=item.slice_name,
        category=item.category,
        fault=fault,
        parts=tuple(_shown(part) for part in item.parts),
        answer=scored.answer if scored is not None else "",
        expected=item.expected,
        hallucinated=tuple(sorted(scored.hallucinated)) if scored is not None else (),
        claims=scored.claims if scored is not None else (),
        note=note,
    )


def _shown(part: str | Media) -> dict[str, str]:
    return {"text": part} if isinstance(part, str) else {part.kind.value: data_uri(part)}


def _tallies(cards: list[Card]) -> dict[str, dict[str, int]]:
    """How many cards each filter shows, by what it filters."""
    tallies: dict[str, dict[str, Any]] = {"slice": {}, "fault": {}}
    for card in cards:
        for by, value in (("slice", card.slice_name), ("fault", card.fault)):
            tallies[by][value] = tallies[by].get(value, 0) + 1
    return tallies
