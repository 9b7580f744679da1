"""How far a judge can be trusted: its rulings beside labels that people gave, and rates as they would be without its errors.

Labels are a JSONL file of claims: {"claim", "label": "yes" or "no", "question", "reference", "objects"}, the last three as the judge would
be shown them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.evals.golden import AnswerKind, BadGoldenSet, Item, Record, read_lines
from mmserve.evals.intervals import Corrected, Observation, Share, cohens_kappa, rogan_gladen
from mmserve.evals.judge import Judge
from mmserve.evals.scoring import Ruling, Scored


@dataclass(frozen=True, slots=True)
class Label:
    item: Item  # as the judge is shown it
    claim: str
    is_supported: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rulings on labelled claims.  Those the judge can't tell count in `undecided` and as disagreement in kappa, in no rate."""

    sensitivity: Share  # supported claims that it supports
    specificity: Share  # unsupported claims that it doesn't
    undecided: Share
    kappa: float | None

    @classmethod
    def of(cls, labels: Sequence[Label], rulings: Sequence[Ruling]) -> Calibration:
        pairs = list(zip(labels, rulings, strict=True))
        decided = [(label, ruling) for label, ruling in pairs if ruling is not Ruling.CANT_TELL]
        return cls(
            sensitivity=_share(ruling is Ruling.YES for label, ruling in decided if label.is_supported),
            specificity=_share(ruling is Ruling.NO for label, ruling in decided if not label.is_supported),
            undecided=_share(ruling is Ruling.CANT_TELL for ruling in rulings),
            kappa=cohens_kappa(("yes" if label.is_supported else "no", str(ruling)) for label, ruling in pairs),
        )

    def corrected(self, seen: Share) -> Corrected | None:
        return rogan_gladen(seen, self.sensitivity, self.specificity)

    def as_json(self) -> dict[str, Any]:
        return {
            "kappa": None if self.kappa is None else round(self.kappa, 4),
            "sensitivity": self.sensitivity.figures(),
            "specificity": self.specificity.figures(),
            "undecided": self.undecided.figures(),
        }


def load_labels(path: Path) -> list[Label]:
    """Raises BadGoldenSet."""
    labels = []
    for value, where in read_lines(path):
        record = Record(value, where)
        claim, verdict = record.text("claim"), record.text("label")
        if verdict not in ("yes", "no"):
            raise record.error("label", f"{verdict!r} is neither yes nor no")
        question = " ".join(record.texts("question"))
        expected, objects = record.texts("reference"), frozenset(record.texts("objects")) if record.has("objects") else None
        record.done()
        labels.append(Label(Item(where, (question,), "label", AnswerKind.OPEN, expected, objects=objects), claim, verdict == "yes"))
    if {label.is_supported for label in labels} != {True, False}:
        raise BadGoldenSet(f"{path}: needs claims of both labels")
    return labels


async def calibrate(judge: Judge, labels: Sequence[Label], concurrency: int, on_done: Callable[[], None]) -> Calibration:
    """Raises JudgeFailed: a judge that can't rule on the labels can't be calibrated."""
    gate = asyncio.Semaphore(concurrency)

    async def rule(label: Label) -> Ruling:
        async with gate:
            ruling = await judge.rule(label.item, label.claim)
            on_done()
            return ruling

    return Calibration.of(labels, await asyncio.gather(*(rule(label) for label in labels)))


def judge_figures(answers: Sequence[Scored], calibration: Calibration | None) -> dict[str, Any]:
    """Claims ruled on, those supported, and the same corrected for the judge's errors."""
    rulings = Counter(claim.ruling for answer in answers for claim in answer.claims)
    decided = Share.of(
        Observation(claim.ruling is Ruling.YES, 1, answer.cluster)
        for answer in answers
        for claim in answer.claims
        if claim.ruling is not Ruling.CANT_TELL
    )
    figures: dict[str, Any] = {"claims": {str(ruling): rulings[ruling] for ruling in Ruling}, "supported": decided.figures()}
    if calibration is not None:
        corrected = calibration.corrected(decided)
        figures["calibration"] = calibration.as_json()
        figures["supported_corrected"] = corrected and {
            "value": round(corrected.value, 5), "lower_95": round(corrected.lower, 5), "upper_95": round(corrected.upper, 5),
        }  # fmt: skip
    return figures


def _share(outcomes: Any) -> Share:
    return Share.of(Observation(bool(outcome), 1, index) for index, outcome in enumerate(outcomes))
