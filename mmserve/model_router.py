"""Small or large, and why.  Pure, and one page: the rule is meant to be read by whoever pays for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from mmserve.errors import ModelNotFound
from mmserve.route_classifier import Asked, RouteClassifier

SMALL, LARGE = "small", "large"
LONG_PROMPT = 2_000  # text characters
MANY_WAITING = 8  # more than at the other decoder: a queue worth going round
PREMIUM_SHARE = 0.5  # of the classifier's threshold, for tenants who pay for it


class RouteReason(StrEnum):
    """For the header x-mmserve-route-reason."""

    HINT = "hint"  # the client named it
    ONLY_MODEL = "only-model"
    ONLY_CAPABLE = "only-capable"  # of the request's media
    SEVERAL_MEDIA = "several-media"
    LONG_PROMPT = "long-prompt"
    QUESTION = "question"  # the classifier says that it is worth it
    SIMPLE = "simple"
    LOAD = "load"  # the other one would have been chosen, and has a long queue
    TIER = "tier"  # the tenant's tier made the difference
    ESCALATED = "escalated"  # the small one began, and was not certain


@dataclass(frozen=True, slots=True)
class ModelChoice:
    model: str  # small or large
    reason: RouteReason
    may_escalate: bool = False  # to the large one, if the small one turns out to be uncertain


def choose_model(
    wanted: str,
    *,
    served_name: str,
    available: Collection[str],
    capable: Collection[str],
    asked: Asked,
    classifier: RouteClassifier | None,
    tier: str,
    waiting: Mapping[str, int],
    canaries: Collection[str],
) -> ModelChoice:
    """The client's hint wins.  `auto` (or the served name) takes the large one for what is worth it, unless its queue is long.

    `capable` are those that take the request's media: `auto` chooses among them, and when there is none, whoever is asked says so.
    Without a classifier for this model two media or a long question are worth it.  `waiting` counts who queues for each decoder.
    `canaries` can be had by name alone.
    Raises ModelNotFound for any other name.
    """
    if wanted in available or wanted in canaries:
        return ModelChoice(wanted, RouteReason.HINT)
    if wanted not in ("auto", served_name):
        raise ModelNotFound(f"model must be one of {', '.join(sorted({served_name, 'auto', *available, *canaries}))}", param="model")
    candidates = capable or available
    if len(candidates) == 1:
        (only,) = candidates
        return ModelChoice(only, RouteReason.ONLY_MODEL if len(available) == 1 else RouteReason.ONLY_CAPABLE)
    choice = _by_tier(asked, classifier, tier)
    other = SMALL if choice.model == LARGE else LARGE
    if _is_worth_going_round(waiting.get(choice.model, 0), waiting.get(other, 0), is_dearer=other == LARGE):
        return ModelChoice(other, RouteReason.LOAD)
    return choice


def _by_tier(asked: Asked, classifier: RouteClassifier | None, tier: str) -> ModelChoice:
    choice = _by_question(asked, classifier)
    if tier == "batch":
        return choice if choice.model == SMALL else ModelChoice(SMALL, RouteReason.TIER)
    if tier == "premium" and choice.model == SMALL and _by_question(asked, classifier, PREMIUM_SHARE).model == LARGE:
        return ModelChoice(LARGE, RouteReason.TIER)
    return choice if choice.model == LARGE else ModelChoice(SMALL, choice.reason, may_escalate=True)


def _by_question(asked: Asked, classifier: RouteClassifier | None, share: float = 1.0) -> ModelChoice:
    """With that share of the classifier's threshold."""
    if asked.num_characters > LONG_PROMPT:  # no classifier has learnt from such
        return ModelChoice(LARGE, RouteReason.LONG_PROMPT)
    if classifier is None:
        if asked.num_images + asked.num_clips >= 2:
            return ModelChoice(LARGE, RouteReason.SEVERAL_MEDIA)
    elif classifier.gain(asked) >= share * classifier.threshold:
        return ModelChoice(LARGE, RouteReason.QUESTION)
    return ModelChoice(SMALL, RouteReason.SIMPLE)


def _is_worth_going_round(num_here: int, num_there: int, *, is_dearer: bool) -> bool:
    """Whether to go to the other decoder.  To a dearer one only if nobody waits there: its time is then nobody else's."""
    return num_here >= num_there + MANY_WAITING and not (is_dearer and num_there)
