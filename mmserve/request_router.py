"""What the model router is told of a request: its last question, its media, its tenant's tier, and how long the queues are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from mmserve.composition import BUNDLED
from mmserve.config import ModelConfig
from mmserve.doubt import Doubt
from mmserve.media import MediaKind
from mmserve.model_router import ModelChoice, choose_model
from mmserve.request import ChatRequest
from mmserve.route_classifier import FILE, Asked, RouteClassifier


class RequestRouter:
    """Raises ConfigError for a classifier that can't be read.  A model without one is routed by rules, and never escalated."""

    def __init__(self, config: ModelConfig, served_name: str, tier_of: Callable[[str], str]) -> None:
        is_one_directory = config.small is None and config.large is None
        file = config.router or ((config.model or BUNDLED) / FILE if is_one_directory else None)
        self.classifier = None if file is None else RouteClassifier.read(file)
        self._escalates = config.escalation
        self._served_name = served_name
        self._tier_of = tier_of

    def choose(
        self,
        request: ChatRequest,
        *,
        available: Collection[str],
        capable: Collection[str],
        waiting: Mapping[str, int],
        canaries: Collection[str],
    ) -> ModelChoice:
        """Raises ModelNotFound."""
        return choose_model(
            request.model,
            served_name=self._served_name,
            available=available,
            capable=capable,
            asked=asked_of(request),
            classifier=self.classifier,
            tier=self._tier_of(request.tenant),
            waiting=waiting,
            canaries=canaries,
        )

    def doubt(self, choice: ModelChoice, request: ChatRequest) -> Doubt | None:
        """For an answer that may be moved from the small to the large decoder."""
        may_escalate = choice.may_escalate and self._escalates and request.sampling.n == 1
        if not may_escalate or self.classifier is None or self.classifier.escalate_above is None:
            return None
        return Doubt(self.classifier.escalate_above, self.classifier.num_judged)


def asked_of(request: ChatRequest) -> Asked:
    kinds = [item.kind for item in request.media]
    text = " ".join(part for part in request.messages[-1].parts if isinstance(part, str))
    return Asked(text, request.num_characters, kinds.count(MediaKind.IMAGE), kinds.count(MediaKind.AUDIO))
