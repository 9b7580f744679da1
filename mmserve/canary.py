"""Is a second set of weights worse than the first?  Two arms, compared slice by slice while answers come in.  Pure: no torch, no clock.

Each pair of rates is looked at after every answer, so an ordinary test would sooner or later cry wolf.  This one holds for all looks
together.  For one arm the mixture of Bernoulli likelihoods over a Beta(1/4, 1) prior, divided by the likelihood at the true rate p,

    M(p) = B(k + 1/4, n - k + 1) / B(1/4, 1) / (p^k (1 - p)^(n - k)),      k of n,

is a martingale that begins at 1 (the mixture SPRT: Robbins, "Statistical methods related to the law of the iterated logarithm", 1970; as
confidence sequences, Howard, Ramdas, McAuliffe & Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", 2021).  So is
the product of two arms', whoever decides which comes next.  By Ville's inequality the chance that it *ever* reaches 1 / a is at most a.
A canary breaches where no two rates that differ by the margin or less leave the product below that.  Any prior will do; this one expects
few wrong answers, and is quicker than Jeffreys' as long as fewer than a quarter are.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, Part

SLICES = ("text", "image", "images", "audio", "image+audio")
CHANCE = 0.05  # at most, that a canary no worse than the margin is ever rolled back, all slices and metrics together
_PRIOR = (0.25, 1.0)
_SETTLING = 50  # halvings: to the last bit of a float
_END_BYTES = 512  # of a media item that tell it from others, with its length


class Metric(StrEnum):
    """What can go wrong with an answer, as far as it is seen while serving."""

    FAILED = "failed"  # numbers that aren't finite, an encoder, a request that ended workers
    EMPTY = "empty"  # it says nothing, or that it can't answer
    UNGROUNDED = "ungrounded"  # it names an object that the vision side didn't see; of answers that name any
    ESCALATED = "escalated"  # so uncertain at its beginning that the large decoder answered; of answers of which that was looked at
    THUMBS_DOWN = "thumbs_down"  # of answers that were rated
    REGENERATED = "regenerated"  # asked again within minutes
    DIFFERENT = "different"  # a shadow's that isn't the client's; of short greedy ones: there is nothing to compare that with but a limit


NEEDED = (Metric.FAILED, Metric.EMPTY, Metric.UNGROUNDED)  # to pass; the others depend on people, of whom there may be none
NUM_TESTS = len(SLICES) * len(Metric)


@dataclass(frozen=True, slots=True)
class Arm:
    """Whose answer it is that counts, and where."""

    canary: str  # its name
    slice_name: str
    is_canary: bool  # else it is of the decoder beside it
    is_watched: bool  # held against its pictures; in shadow mode, answered by the canary too


@dataclass(slots=True)
class Tally:
    hits: int = 0  # answers that went wrong
    trials: int = 0

    @property
    def rate(self) -> float:
        return self.hits / self.trials if self.trials else 0.0

    def __str__(self) -> str:
        return f"{self.hits}/{self.trials}"


@dataclass(slots=True)
class Pair:
    """One metric in one slice."""

    canary: Tally = field(default_factory=Tally)
    stable: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class Breach:
    slice_name: str
    metric: Metric
    canary: Tally
    stable: Tally
    at_least: float  # how much more often it goes wrong with the canary; of answers that differ, their share

    def __str__(self) -> str:
        if self.metric is Metric.DIFFERENT:
            return f"{self.metric} {self.canary}, at least {self.at_least:.3f} of them"
        return f"{self.metric} {self.canary} against {self.stable}, at least {self.at_least:.3f} more often"


class Comparison:
    """The books of one canary.  `counts` are those of an earlier life: (slice, metric, of the canary?) -> (hits, trials).

    `disagreement` is the share of answers that may differ.
    """

    def __init__(
        self, margin: float, counts: Mapping[tuple[str, str, bool], tuple[int, int]] | None = None, *, disagreement: float = 1.0
    ) -> None:
        self.margin = margin
        self.disagreement = disagreement
        self.pairs: dict[tuple[str, Metric], Pair] = {}
        self._open: set[tuple[str, Metric]] = set()  # of those that are needed, and not known to differ by less than the margin
        for (slice_name, metric, is_canary), (hits, trials) in (counts or {}).items():
            tally = self._tally(slice_name, Metric(metric), is_canary)
            tally.hits, tally.trials = hits, trials
        for key in self.pairs:
            self._settle(*key)

    def note(self, arm: Arm, metric: Metric, is_hit: bool) -> Breach | None:
        """One more answer.  A breach if it is now certain that the canary does worse here, by more than the margin."""
        tally = self._tally(arm.slice_name, metric, arm.is_canary)
        tally.trials += 1
        tally.hits += is_hit
        pair = self.pairs[arm.slice_name, metric]
        self._settle(arm.slice_name, metric)
        canary, stable = Tally(pair.canary.hits, pair.canary.trials), Tally(pair.stable.hits, pair.stable.trials)
        nats = excess(canary, self.disagreement) if metric is Metric.DIFFERENT else evidence(canary, stable, self.margin)
        if nats < LEAST_EVIDENCE:
            return None
        at_least = least_rate(canary) if metric is Metric.DIFFERENT else difference(canary, stable)[0]
        return Breach(arm.slice_name, metric, canary, stable, at_least)

    def needed(self) -> Mapping[tuple[str, Metric], Pair]:
        """Those that decide whether it has passed."""
        return {key: pair for key, pair in self.pairs.items() if key[1] in NEEDED}

    @property
    def has_passed(self) -> bool:
        """In each slice that was seen, all that is needed is known to differ by less than the margin."""
        return bool(self.pairs) and not self._open

    def _settle(self, slice_name: str, metric: Metric) -> None:
        """Whether this is known to differ by less than the margin, if it is needed."""
        if metric in NEEDED:
            pair = self.pairs[slice_name, metric]
            is_known = evidence(pair.stable, pair.canary, -self.margin) >= LEAST_EVIDENCE
            (self._open.discard if is_known else self._open.add)((slice_name, metric))

    def _tally(self, slice_name: str, metric: Metric, is_canary: bool) -> Tally:
        pair = self.pairs.setdefault((slice_name, metric), Pair())
        return pair.canary if is_canary else pair.stable


# --- the test ----------------------------------------------------------------------------------------------------------------


def least_evidence(chance: float, num_tests: int = NUM_TESTS) -> float:
    """Nats that make a breach, so that one of `num_tests` comparisons is ever wrong with at most that chance."""
    return -math.log(chance / num_tests)


LEAST_EVIDENCE = least_evidence(CHANCE)


def evidence(canary: Tally, stable: Tally, limit: float) -> float:
    """Nats against rate(canary) - rate(stable) <= limit: the log of the least product of the two mixtures that such rates leave.

    Never more than -log(a) at any time with chance 1 - a, if the difference is within the limit.  0 while the counts themselves are.
    """
    if not canary.trials or not stable.trials or canary.rate - stable.rate <= limit:
        return 0.0
    low, high = max(0.0, -limit), min(1.0, 1.0 - limit)  # of the stable rate, where the canary's is `limit` above it
    for _ in range(_SETTLING):
        rate = (low + high) / 2
        if _slope(canary, rate + limit) + _slope(stable, rate) > 0:  # of a convex function
            high = rate
        else:
            low = rate
    return max(0.0, _log_mixture(canary, high + limit) + _log_mixture(stable, high))


def excess(tally: Tally, limit: float) -> float:
    """Nats against a rate of at most `limit`, of one arm alone."""
    return max(0.0, _log_mixture(tally, limit)) if tally.rate > limit else 0.0


def least_rate(tally: Tally, nats: float = LEAST_EVIDENCE) -> float:
    """The rate is at least this at all times, but for a chance of exp(-nats)."""
    return _bisect(0.0, tally.rate, lambda limit: excess(tally, limit) >= nats)


def difference(canary: Tally, stable: Tally, nats: float = LEAST_EVIDENCE) -> tuple[float, float]:
    """rate(canary) - rate(stable) lies between these two at all times, but for a chance of exp(-nats) on either side."""
    return _least_limit(canary, stable, nats), -_least_limit(stable, canary, nats)


def _least_limit(first: Tally, second: Tally, nats: float) -> float:
    """The least difference of rates that the counts leave possible, from below."""
    return _bisect(-1.0, first.rate - second.rate, lambda limit: evidence(first, second, limit) >= nats)


def _bisect(low: float, high: float, is_below: Callable[[float], bool]) -> float:
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def _log_mixture(tally: Tally, rate: float) -> float:
    """log M(rate)"""
    hits, misses = tally.hits, tally.trials - tally.hits
    mixed = _log_beta(hits + _PRIOR[0], misses + _PRIOR[1]) - _log_beta(*_PRIOR)
    return mixed - _times_log(hits, rate) - _times_log(misses, 1 - rate)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _slope(tally: Tally, rate: float) -> float:
    """Of log M, by the rate."""
    hits, misses = tally.hits, tally.trials - tally.hits
    return (misses / (1 - rate) if misses and rate < 1 else 0.0) - (hits / rate if hits and rate > 0 else 0.0)


def _times_log(count: int, share: float) -> float:
    return count * math.log(share) if count and share > 0 else -math.inf if count else 0.0


# --- who goes where ----------------------------------------------------------------------------------------------------------


def slice_of(media: Sequence[MediaItem]) -> str:
    """The mix of media, called as in `mmserve eval`."""
    num_images = sum(item.kind is MediaKind.IMAGE for item in media)
    if len(media) > num_images:
        return "image+audio" if num_images else "audio"
    return SLICES[min(num_images, 2)]


def takes(share: float, key: bytes, seed: bytes) -> bool:
    """Whether `key` is in the share: always the same for the same seed, and independent from seed to seed."""
    return int.from_bytes(hashlib.sha256(seed + key).digest()[:8]) < share * 2**64


def conversation(request: ChatRequest) -> bytes:
    """A digest that all turns of a tenant's conversation have in common: who asks, and all up to the first thing that a user says.

    Media are told apart by their length and ends: reading all of them takes too long here.
    """
    digest = hashlib.sha256(f"{len(request.tenant)} {request.tenant}".encode())
    for message in request.messages:
        for part in message.parts:
            digest.update(_words_of(part))
        if message.role == "user":
            break
    return digest.digest()


def _words_of(part: Part) -> bytes:
    if isinstance(part, MediaItem):
        return f"{part.kind.value} {len(part.data)} ".encode() + part.data[:_END_BYTES] + part.data[-_END_BYTES:]
    return f"text {len(part)} ".encode() + part.encode("utf-8", "surrogatepass")


class Reasked:
    """Which questions were asked again.  Each counts once, when `within_s` have passed since it was first asked: hits and misses alike."""

    def __init__(self, *, within_s: float = 300.0, max_questions: int = 2**13) -> None:
        self._within_s = within_s
        self._max_questions = max_questions
        self._waiting: OrderedDict[bytes, tuple[float, Arm, bool]] = OrderedDict()  # first asked first

    def note(self, question: bytes, arm: Arm, now_s: float) -> Iterable[tuple[Arm, bool]]:
        """Somebody asks.  Returns what has become certain meanwhile: whose answer, and whether it was asked for again."""
        settled = list(self._settle(now_s))
        if question in self._waiting:
            asked_s, first, _ = self._waiting[question]
            self._waiting[question] = (asked_s, first, True)
        else:
            self._waiting[question] = (now_s, arm, False)
        return settled

    def _settle(self, now_s: float) -> Iterator[tuple[Arm, bool]]:
        while self._waiting:
            question, (asked_s, arm, is_again) = next(iter(self._waiting.items()))
            if now_s - asked_s < self._within_s and len(self._waiting) < self._max_questions:
                return
            del self._waiting[question]
            yield arm, is_again
