"""An evaluation as one JSON object: what is saved, compared, and made into pages.  Pure but for its date."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from mmserve.evals.figures import by_category, by_slice, macro, of_all_media
from mmserve.evals.gate import Finding, StatesDiffer
from mmserve.evals.probes import OrderProbe, order_figures, state_figures
from mmserve.evals.scoring import Scored
from mmserve.evals.session import Evaluation

FORMAT = "mmserve-eval-1"


def report_of(evaluation: Evaluation) -> dict[str, Any]:
    """Figures by slice and category, the gate's decision, and every answer."""
    answers, decision = evaluation.answers, evaluation.decision
    slices = by_slice(answers)
    average = macro(slices)
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "set": {"name": evaluation.golden.name, "items": len(evaluation.golden.items)},
        "server": {"url": evaluation.url, "model": evaluation.model},
        "seconds": round(evaluation.seconds, 1),
        "macro": average and {"value": round(average.value, 5), "lower_95": round(average.lower, 5)},
        "all_media": of_all_media(answers).as_json(),
        "slices": {name: figures.as_json() for name, figures in slices.items()},
        "categories": {name: figures.as_json() for name, figures in by_category(answers).items()},
        "order": order_figures(evaluation.order) if evaluation.order else None,
        "states": None if evaluation.states is None else state_figures(evaluation.states),
        "fidelity": evaluation.fidelity,
        "judge": evaluation.judging,
        "gate": {
            "outcome": decision.outcome.name.lower(),
            "bars": asdict(evaluation.bars),
            "findings": [_finding(finding) for finding in decision.findings],
        },
        "answers": [_answer(answer) for answer in answers],
        "order_probes": [_order_probe(probe) for probe in evaluation.order],
    }


def _order_probe(probe: OrderProbe) -> dict[str, Any]:
    return {"id": probe.item.id, "result": str(probe.result), "answer": probe.answer, "swapped_answer": probe.swapped_answer}


def _finding(finding: Finding | StatesDiffer) -> dict[str, Any]:
    return {"slice": finding.slice_name, "metric": finding.metric, "breach": finding.is_breach, "text": str(finding)}


def _answer(scored: Scored) -> dict[str, Any]:
    return {
        "id": scored.item.id,
        "slice": scored.item.slice_name,
        "category": scored.item.category,
        "question": scored.item.text,
        "expected": list(scored.item.expected),
        "answer": scored.answer,
        "right": scored.is_right,
        "grounded": scored.is_grounded,
        "named": sorted(scored.named),
        "hallucinated": sorted(scored.hallucinated),
        "refuses": scored.refuses,
        "claims": [{"text": claim.text, "ruling": str(claim.ruling)} for claim in scored.claims],
        "error": scored.error,
    }
