"""Has a share risen beyond chance?  The last half hour against the day before it.  Pure: time is an argument.

The bound is Chernoff's: k or more of n at a true share p have a chance of at most exp(-n KL(k/n || p)) (Hoeffding, "Probability
inequalities for sums of bounded random variables", 1963, theorem 1).  It holds for any n and costs nothing to compute.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

BUCKET_S = 60.0
Z_PAST = 3.0  # the past's own share is taken at this many deviations above what was counted


@dataclass(frozen=True, slots=True)
class RateAlarm:
    """`num_hits` of `num_trials` lately, where the past had a share of `past_share`."""

    span_s: float
    num_trials: int
    num_hits: int
    past_share: float


class RateWatch:
    """`note` each trial.  Says something at most once every `alarm_every_s`, and nothing before the past has `least_past` trials."""

    def __init__(
        self,
        *,
        recent_s: float = 1800.0,
        past_s: float = 86_400.0,
        least_recent: int = 20,
        least_past: int = 200,
        chance: float = 1e-5,
        alarm_every_s: float = 1800.0,
    ) -> None:
        self._recent_s = recent_s
        self._past_s = past_s
        self._least_recent = least_recent
        self._least_past = least_past
        self._least_evidence = -math.log(chance)
        self._alarm_every_s = alarm_every_s
        self._alarmed_s = -math.inf
        self._recent = _Counts()
        self._past = _Counts()

    def note(self, is_hit: bool, now_s: float) -> RateAlarm | None:
        while bucket := self._recent.pop_before(now_s - self._recent_s):
            self._past.append(bucket)
        while self._past.pop_before(now_s - self._past_s):
            pass
        self._recent.add(now_s, is_hit)
        recent, past = self._recent, self._past
        if recent.num_trials < self._least_recent or past.num_trials < self._least_past or now_s - self._alarmed_s < self._alarm_every_s:
            return None
        past_share = _upper(past.num_hits, past.num_trials)
        if _evidence(recent.num_hits, recent.num_trials, past_share) < self._least_evidence:
            return None
        self._alarmed_s = now_s
        return RateAlarm(self._recent_s, recent.num_trials, recent.num_hits, past.num_hits / past.num_trials)


@dataclass(slots=True)
class _Bucket:
    start_s: float
    num_trials: int = 0
    num_hits: int = 0


class _Counts:
    """Buckets of a minute, oldest first, and their sums."""

    def __init__(self) -> None:
        self.num_trials = self.num_hits = 0
        self._buckets: deque[_Bucket] = deque()

    def add(self, now_s: float, is_hit: bool) -> None:
        if not self._buckets or now_s - self._buckets[-1].start_s >= BUCKET_S:
            self._buckets.append(_Bucket(now_s))
        self._buckets[-1].num_trials += 1
        self._buckets[-1].num_hits += is_hit
        self.num_trials += 1
        self.num_hits += is_hit

    def append(self, bucket: _Bucket) -> None:
        self._buckets.append(bucket)
        self.num_trials += bucket.num_trials
        self.num_hits += bucket.num_hits

    def pop_before(self, start_s: float) -> _Bucket | None:
        if not self._buckets or self._buckets[0].start_s > start_s:
            return None
        bucket = self._buckets.popleft()
        self.num_trials -= bucket.num_trials
        self.num_hits -= bucket.num_hits
        return bucket


def _upper(count: int, total: int) -> float:
    """Wilson's upper bound."""
    share, z2 = count / total, Z_PAST**2
    spread = Z_PAST * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return min(1.0, (share + z2 / (2 * total) + spread) / (1 + z2 / total))


def _evidence(count: int, total: int, share: float) -> float:
    """total * KL(count / total || share), or 0 for no more than was to be expected: nats against chance."""
    seen = count / total
    if seen <= share:
        return 0.0
    return total * (seen * math.log(seen / share) + ((1 - seen) * math.log((1 - seen) / (1 - share)) if seen < 1 else 0.0))
