"""Scored answers to figures, by slice and category.  Pure.

GA   grounding accuracy: answers that are right and grounded, of all that are scored; macro: each media slice weighs the same
HOR  hallucinated-object rate: objects named that aren't there, of all objects named (CHAIR_i, each object once an answer)
HRR  per-response rate: answers that name one, of all answers to annotated items (CHAIR_s)
COV  coverage: objects named, of those that are there, over the items that ask for all
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mmserve.evals.golden import MEDIA_SLICES, SLICES, AnswerKind
from mmserve.evals.intervals import Z_95, Observation, Share, wilson
from mmserve.evals.scoring import Scored
from mmserve.evals.wording import yes_or_no


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one group of answers."""

    items: int
    unscored: int  # open items without a ruling: neither right nor wrong
    failed: int  # got no answer, and count as wrong
    accuracy: Share
    hallucinated_objects: Share
    hallucinating_answers: Share
    coverage: Share
    refusals: Share
    said_yes: Share  # over the yes/no items
    expected_yes: Share

    @classmethod
    def of(cls, answers: Sequence[Scored]) -> Figures:
        annotated = [a for a in answers if a.item.objects is not None]
        closed = [a for a in answers if a.item.kind is AnswerKind.YES_NO and a.error is None]
        scored = [a for a in answers if a.is_grounded is not None]
        return cls(
            items=len(answers),
            unscored=len(answers) - len(scored),
            failed=sum(a.error is not None for a in answers if a.is_right is not None),
            accuracy=Share.of(Observation(bool(a.is_grounded), 1, a.cluster) for a in scored),
            hallucinated_objects=Share.of(Observation(len(a.hallucinated), len(a.named), a.cluster) for a in annotated),
            hallucinating_answers=Share.of(Observation(bool(a.hallucinated), 1, a.cluster) for a in annotated),
            coverage=Share.of(
                Observation(len(a.named & a.item.objects), len(a.item.objects), a.cluster)
                for a in annotated
                if a.item.asks_for_all and a.item.objects
            ),
            refusals=Share.of(Observation(a.refuses, 1, a.cluster) for a in answers if not a.item.expects_refusal),
            said_yes=Share.of(Observation(yes_or_no(a.answer) == "yes", 1, a.cluster) for a in closed),
            expected_yes=Share.of(Observation("yes" in a.item.expected, 1, a.cluster) for a in closed),
        )

    @property
    def yes_bias(self) -> float | None:
        """How much more often it says yes than is right; 0 is none."""
        said, expected = self.said_yes.value, self.expected_yes.value
        return None if said is None or expected is None else said - expected

    def as_json(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "unscored": self.unscored,
            "failed": self.failed,
            "grounding_accuracy": self.accuracy.figures(),
            "hallucinated_object_rate": self.hallucinated_objects.figures(),
            "hallucinating_answer_rate": self.hallucinating_answers.figures(),
            "coverage": self.coverage.figures(),
            "refusal_rate": self.refusals.figures(),
            "yes_bias": None if self.yes_bias is None else round(self.yes_bias, 5),
            "said_yes": self.said_yes.figures(),
            "expected_yes": self.expected_yes.value,
        }


@dataclass(frozen=True, slots=True)
class Macro:
    """GA over the media slices, each weighing the same."""

    value: float
    lower: float


def by_slice(answers: Iterable[Scored]) -> dict[str, Figures]:
    """In the order of SLICES; those without items aren't there."""
    groups = _grouped((answer.item.slice_name, answer) for answer in answers)
    return {name: Figures.of(groups[name]) for name in SLICES if name in groups}


def by_category(answers: Iterable[Scored]) -> dict[str, Figures]:
    """Keyed "slice / category"."""
    groups = _grouped((f"{answer.item.slice_name} / {answer.item.category}", answer) for answer in answers)
    return {name: Figures.of(groups[name]) for name in sorted(groups)}


def of_all_media(answers: Iterable[Scored]) -> Figures:
    """All media slices in one, each answer weighing the same."""
    return Figures.of([answer for answer in answers if answer.item.media])


def macro(slices: dict[str, Figures]) -> Macro | None:
    """None without a scored media item.  The bound adds the slices' variances, smoothed as Wilson's interval smooths them."""
    shares = [slices[name].accuracy for name in MEDIA_SLICES if name in slices and slices[name].accuracy.total]
    if not shares:
        return None
    value = sum(share.value or 0.0 for share in shares) / len(shares)
    variance = sum(_smoothed_variance(share) for share in shares) / len(shares) ** 2
    return Macro(value, wilson(value, max(value * (1 - value), variance) / variance, -1))


def _smoothed_variance(share: Share) -> float:
    trials = share.effective + Z_95**2
    middle = ((share.value or 0.0) * share.effective + Z_95**2 / 2) / trials
    return middle * (1 - middle) / trials


def _grouped(named: Iterable[tuple[str, Scored]]) -> dict[str, list[Scored]]:
    groups: dict[str, list[Scored]] = defaultdict(list)
    for name, answer in named:
        groups[name].append(answer)
    return groups
