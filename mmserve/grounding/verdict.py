"""An answer against its pictures: which of the objects it says are there the vision side saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmserve.grounding.mentions import Mention, Stance, find_mentions
from mmserve.grounding.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Finding:
    """One mention.  `score` is how likely the object is in some picture, None where the detector doesn't know it or nobody claims it."""

    mention: Mention
    text: str  # as it stands in the answer
    score: float | None = None
    is_supported: bool | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one answer."""

    findings: tuple[Finding, ...]

    @property
    def num_checked(self) -> int:
        return sum(finding.is_supported is not None for finding in self.findings)

    @property
    def num_unsupported(self) -> int:
        return sum(finding.is_supported is False for finding in self.findings)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Objects, each once, in the answer's order."""
        return tuple(dict.fromkeys(finding.mention.name for finding in self.findings if finding.is_supported is False))

    @property
    def score(self) -> float | None:
        """Share of checked mentions that are supported, 1 - CHAIR_i as the vision side sees it; None when there was nothing to check."""
        return 1 - self.num_unsupported / self.num_checked if self.num_checked else None


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a request: the verdict on each of its choices, as they were given."""

    mode: str  # flag, regenerate, or sample: nobody asked, and nobody is told
    verdicts: tuple[Verdict, ...] = ()
    num_draws: int = 1
    is_unavailable: bool = False  # pictures could not be looked at

    @property
    def num_checked(self) -> int:
        return sum(verdict.num_checked for verdict in self.verdicts)

    @property
    def num_unsupported(self) -> int:
        return sum(verdict.num_unsupported for verdict in self.verdicts)

    @property
    def score(self) -> float | None:
        """Share of checked mentions that are supported; None when there was nothing to check."""
        return 1 - self.num_unsupported / self.num_checked if self.num_checked else None

    @property
    def outcome(self) -> str:
        """supported, regenerated (so by a second draw), unsupported, unchecked (it claims nothing that can be checked) or unavailable."""
        if self.is_unavailable:
            return "unavailable"
        if not self.num_checked:
            return "unchecked"
        if self.num_unsupported:
            return "unsupported"
        return "supported" if self.num_draws == 1 else "regenerated"


class Grounder:
    """A vocabulary and how sure the vision side must be.  It takes scores and knows no pictures."""

    def __init__(self, vocabulary: Vocabulary, labels: Sequence[str], threshold: float, thresholds: Mapping[str, float]) -> None:
        self._vocabulary = vocabulary
        self._index = {label: i for i, label in enumerate(labels)}
        self._threshold = threshold
        self._thresholds = thresholds

    def judge(self, text: str, scores: Sequence[np.ndarray]) -> Verdict:
        """`scores` float32 [L] of each picture; an object in any of them is there.  Without pictures nothing is checked."""
        best = np.max(scores, axis=0) if scores else None
        return Verdict(tuple(self._find(text, mention, best) for mention in find_mentions(text, self._vocabulary)))

    def _find(self, text: str, mention: Mention, best: np.ndarray | None) -> Finding:
        said = text[mention.start : mention.stop]
        index = self._index.get(mention.name)
        if best is None or index is None or mention.stance is not Stance.ASSERTED:
            return Finding(mention, said)
        score = float(best[index])
        return Finding(mention, said, score, score >= self._thresholds.get(mention.name, self._threshold))
