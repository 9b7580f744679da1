"""Small or large, and why.  Pure, and one page: the rule is meant to be read by whoever pays for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mmserve.errors import ModelNotFound

LONG_PROMPT = 2_000  # text characters


@dataclass(frozen=True, slots=True)
class ModelChoice:
    model: str  # small or large
    reason: str  # a word for the header x-mmserve-route-reason


def choose_model(
    wanted: str, *, served_name: str, available: Collection[str], capable: Collection[str], num_media: int, num_characters: int
) -> ModelChoice:
    """The client's hint wins.  `auto` (or the served name) takes the large one for two media or more and for long questions.

    `capable` are those that take the request's media: `auto` chooses among them, and when there is none, whoever is asked says so.
    Raises ModelNotFound for any other name.
    """
    if wanted in available:
        return ModelChoice(wanted, "hint")
    if wanted not in ("auto", served_name):
        raise ModelNotFound(f"model must be one of {', '.join(sorted({served_name, 'auto', *available}))}", param="model")
    candidates = capable or available
    if len(candidates) == 1:
        (only,) = candidates
        return ModelChoice(only, "only-model" if len(available) == 1 else "only-capable")
    if num_media >= 2:
        return ModelChoice("large", "several-media")
    if num_characters > LONG_PROMPT:
        return ModelChoice("large", "long-prompt")
    return ModelChoice("small", "simple")
