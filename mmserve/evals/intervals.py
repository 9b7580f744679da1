"""Shares with one-sided 95 % bounds, and tests on pairs.  Pure arithmetic.

Items that show the same picture fail together, so a share is a ratio over *clusters*: the bound is Wilson's at an effective number of
trials, the real number divided by the design effect (Dean & Pagano, "Evaluating confidence interval methods for binomial proportions in
clustered surveys", 2015).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

Z_95 = 1.6448536269514722  # one-sided


@dataclass(frozen=True, slots=True)
class Observation:
    """`count` of `total` trials of one answer came out; answers of the same cluster aren't independent."""

    count: int
    total: int
    cluster: Hashable


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `total`; `effective` is how many independent trials that is worth, at most `total`."""

    count: int
    total: int
    effective: float

    @classmethod
    def of(cls, observations: Iterable[Observation]) -> Share:
        clusters: dict[Hashable, list[int]] = defaultdict(lambda: [0, 0])
        for seen in observations:
            cluster = clusters[seen.cluster]
            cluster[0] += seen.count
            cluster[1] += seen.total
        tried = [(count, total) for count, total in clusters.values() if total]
        count, total = sum(c for c, _ in tried), sum(t for _, t in tried)
        return cls(count, total, total / _design_effect(tried, count, total) if total else 0.0)

    @property
    def value(self) -> float | None:
        return self.count / self.total if self.total else None

    @property
    def lower(self) -> float:
        """0 where nothing was tried."""
        return wilson(self.value or 0.0, self.effective, -1)

    @property
    def upper(self) -> float:
        """1 where nothing was tried."""
        return wilson(self.value or 0.0, self.effective, +1)

    def figures(self) -> dict[str, Any]:
        value = self.value
        return {
            "value": None if value is None else round(value, 5),
            "count": self.count,
            "total": self.total,
            "effective": round(self.effective, 1),
            "lower_95": round(self.lower, 5),
            "upper_95": round(self.upper, 5),
        }


def wilson(share: float, trials: float, side: int) -> float:
    """One-sided 95 % Wilson score bound (Wilson 1927): the lower one with side -1, the upper one with +1."""
    if trials == 0:
        return 0.0 if side < 0 else 1.0
    z2 = Z_95**2
    spread = Z_95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return min(1.0, max(0.0, (share + z2 / (2 * trials) + side * spread) / (1 + z2 / trials)))


def trials_needed(share: float, bar: float, side: int) -> int | None:
    """The least number of independent trials at which a share of `share` clears `bar`; None if none does.

    With side -1 the lower bound must reach the bar, with +1 the upper bound must stay below it.
    """
    if share <= bar if side < 0 else share >= bar:
        return None
    # Wilson's bound meets the bar where the score test does: z^2 * bar * (1 - bar) / n = (share - bar)^2.
    trials = Z_95**2 * bar * (1 - bar) / (share - bar) ** 2
    return math.ceil(trials) if side < 0 else math.floor(trials) + 1


def mcnemar(better: int, worse: int) -> float:
    """Two-sided p-value of the exact test on the pairs that differ (McNemar 1947): a coin that fell `better` to `worse`."""
    n, k = better + worse, min(better, worse)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def cohens_kappa(pairs: Iterable[tuple[str, str]]) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960); None where chance alone explains all of it."""
    rated = list(pairs)
    if not rated:
        return None
    n = len(rated)
    agreed = sum(a == b for a, b in rated) / n
    labels = {label for pair in rated for label in pair}
    by_chance = sum(sum(a == label for a, _ in rated) * sum(b == label for _, b in rated) for label in labels) / n**2
    return None if by_chance == 1 else (agreed - by_chance) / (1 - by_chance)


@dataclass(frozen=True, slots=True)
class Corrected:
    """A share as it would be without the rater's errors, and its one-sided 95 % bounds."""

    value: float
    lower: float
    upper: float


def rogan_gladen(seen: Share, sensitivity: Share, specificity: Share) -> Corrected | None:
    """The true share behind what an imperfect rater saw (Rogan & Gladen 1978); None for a rater no better than a coin.

    Bounds are those of Lang & Reiczigel (2014): each of the three shares is smoothed, and their variances add up.
    """
    z2 = Z_95**2
    if min(seen.total, sensitivity.total, specificity.total) == 0:
        return None
    se, n_se = (sensitivity.count + 1) / (sensitivity.total + 2), sensitivity.total + 2
    sp, n_sp = (specificity.count + 1) / (specificity.total + 2), specificity.total + 2
    n_seen = seen.effective + z2
    ap = ((seen.value or 0.0) * seen.effective + z2 / 2) / n_seen
    youden = se + sp - 1
    if youden <= 0:
        return None
    p = min(1.0, max(0.0, (ap + sp - 1) / youden))
    variance = (ap * (1 - ap) / n_seen + se * (1 - se) / n_se * p**2 + sp * (1 - sp) / n_sp * (1 - p) ** 2) / youden**2
    shift = 2 * z2 * (p * se * (1 - se) / n_se - (1 - p) * sp * (1 - sp) / n_sp)
    raw_se, raw_sp = sensitivity.count / sensitivity.total, specificity.count / specificity.total
    if raw_se + raw_sp <= 1:
        return None
    value = min(1.0, max(0.0, ((seen.value or 0.0) + raw_sp - 1) / (raw_se + raw_sp - 1)))
    spread = Z_95 * math.sqrt(variance)
    return Corrected(value, min(1.0, max(0.0, p + shift - spread)), max(0.0, min(1.0, p + shift + spread)))


def _design_effect(clusters: list[tuple[int, int]], count: int, total: int) -> float:
    """How much wider than a binomial the ratio spreads, by the variance between clusters; never less than 1.

    Where all or none came out, that variance says nothing, and each cluster is taken for one trial.
    """
    if count in (0, total):
        return total / len(clusters)
    if len(clusters) < 2:
        return float(total)
    share = count / total
    between = len(clusters) / (len(clusters) - 1) * sum((c - share * t) ** 2 for c, t in clusters) / total**2
    return max(1.0, between / (share * (1 - share) / (total - 1)))
