"""What one answer is worth.  Pure: an item and a text go in, a Scored comes out.

Grounded means right and with nothing beside it that isn't there: an answer to a closed item that is right but names an object the
annotations don't have is not grounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mmserve.evals.golden import AnswerKind, Item
from mmserve.evals.wording import chosen, named, normal_form, yes_or_no
from mmserve.grounding.refusals import declines
from mmserve.grounding.vocabulary import Vocabulary


class Ruling(StrEnum):
    """What a judge says of one claim."""

    YES = "yes"
    NO = "no"
    CANT_TELL = "can't tell"


@dataclass(frozen=True, slots=True)
class Claim:
    text: str
    ruling: Ruling


@dataclass(frozen=True, slots=True)
class Scored:
    """One item, what was answered, and what that is worth.  `is_right` is None for an open item that nobody judged."""

    item: Item
    cluster: str
    answer: str
    is_right: bool | None
    named: frozenset[str]  # objects that the answer says are there
    claims: tuple[Claim, ...] = ()
    error: str | None = None  # why there is no answer, or why the judge gave none

    @property
    def hallucinated(self) -> frozenset[str]:
        return frozenset() if self.item.objects is None else self.named - self.item.objects

    @property
    def is_grounded(self) -> bool | None:
        return None if self.is_right is None else self.is_right and not self.hallucinated

    @property
    def refuses(self) -> bool:
        """Declines what could have been answered."""
        return declines(self.answer) and not self.item.expects_refusal


def score(item: Item, cluster: str, answer: str, vocabulary: Vocabulary) -> Scored:
    """An open item stays unscored; `judged` is for those."""
    is_right = None if item.kind is AnswerKind.OPEN else matches(item, answer, item.expected, vocabulary)
    return Scored(item, cluster, answer, is_right, _named(item, answer, vocabulary))


def failed(item: Item, cluster: str, error: str) -> Scored:
    """A question that got no answer is wrong, of whatever kind it is: a server that drops what is hard isn't better for it."""
    return Scored(item, cluster, "", is_right=False, named=frozenset(), error=error)


def judged(scored: Scored, claims: Sequence[Claim]) -> Scored:
    """Right if every claim is supported and there is one; unscored if one can't be told and none is refuted."""
    rulings = {claim.ruling for claim in claims}
    is_right = False if Ruling.NO in rulings or not claims else None if Ruling.CANT_TELL in rulings else True
    return Scored(scored.item, scored.cluster, scored.answer, is_right, scored.named, tuple(claims), scored.error)


def matches(item: Item, answer: str, expected: Sequence[str], vocabulary: Vocabulary) -> bool:
    """Whether a closed item's answer is one of `expected`, in normal form."""
    match item.kind:
        case AnswerKind.YES_NO:
            return yes_or_no(answer) in expected
        case AnswerKind.CHOICE:
            found = chosen(normal_form(answer, vocabulary), [normal_form(choice, vocabulary) for choice in item.choices])
            return found is not None and found in [normal_form(choice, vocabulary) for choice in expected]
        case AnswerKind.SHORT:
            return normal_form(answer, vocabulary) in [normal_form(text, vocabulary) for text in expected]
    raise AssertionError(f"an item of kind {item.kind} has no exact match")


def _named(item: Item, answer: str, vocabulary: Vocabulary) -> frozenset[str]:
    if item.asks_about is None:
        return named(answer, vocabulary)
    return frozenset({item.asks_about} if yes_or_no(answer) == "yes" else ())
