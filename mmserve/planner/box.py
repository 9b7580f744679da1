"""A box of cards cut up into decoders and encoders: which requests go where, what is carried, how soon, and what is refused.

Short texts, long ones and media keep apart, as `scheduler.crowd` places them: each kind has as many replicas as make the harm that all do
to each other least.  If there are too many, text has what it needs, as it costs less and so goes first, but one replica is left to media.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmserve.planner.replica_load import Decoder, Load, ReplicaModel, Wait, root, wait_of, waiting_chance
from mmserve.planner.workload import MODALITIES, Array, Prompts, Workload, prompts_of, quantile
from mmserve.roofline.hardware import Card
from mmserve.scheduler.crowd import MEDIA_HASTE

MICRO_BATCH_S = 0.012  # how long the first picture of a batch waits for others
MAX_QUEUE_WAIT_S = 0.3  # who would foreseeably wait longer for a first step is refused
MIN_ROWS = 1e-3  # of a replica
REFUSING = 0.99  # of what is offered: who takes less is too busy altogether, and not now and then
P99_SIGMAS = 2.326  # of a normal distribution, one-sided


@dataclass(frozen=True, slots=True)
class Encoders:
    """Cards that encode pictures and clips by turns."""

    card: Card
    num_cards: float  # a part of one, where others have the rest

    def work_s(self, prompts: Prompts) -> Array:
        """[N] seconds of one card for the media of each prompt."""
        return prompts.num_encodes / self.card.pictures_per_s + prompts.encode_audio_s / self.card.audio_s_per_s

    def max_rate(self, prompts: Prompts) -> float:
        """Such requests a second at most."""
        mean_s = prompts.mean(self.work_s(prompts))
        return self.num_cards / mean_s if mean_s else math.inf

    def delay_s(self, prompts: Prompts, rate: float) -> Array:
        """[N] from a request's arrival until the rows of its media are there, while `rate` such requests come a second.

        Decode on a core, a micro-batch's window, a wait (M/G/m by Sakasegawa's formula), and the batch.
        """
        work_s = self.work_s(prompts)
        mean_s = prompts.mean(work_s)
        if mean_s == 0:
            return np.zeros_like(work_s)
        load = min(rate * mean_s / self.num_cards, 1 - 1e-6)
        chance = waiting_chance(load, self.num_cards)
        scv = prompts.mean(work_s**2) / mean_s**2 - 1
        wait_s = min(chance * mean_s / (self.num_cards * (1 - load)) * (1 + scv) / 2, MAX_QUEUE_WAIT_S)
        others_s = load * MICRO_BATCH_S  # who came within the window and goes first
        return np.where(work_s > 0, prompts.decode_s + MICRO_BATCH_S + wait_s + others_s + work_s, 0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """Replicas at one rate: a replica's load, the wait for it, and when media are there."""

    load: Load
    wait: Wait
    media_s: Array  # [N]


@dataclass(frozen=True)
class Kind:
    """Requests that are placed alike."""

    name: str
    model: ReplicaModel
    share: float  # of all requests
    haste: float = 1.0  # how much a GPU-ms matters to their answers

    @property
    def weight(self) -> float:
        """n rows on a replica, whose prompts take m GPU-ms each, harm each other by haste * m * n * n.

        Summed over all replicas that is least where n times the square root of haste * m is the same everywhere.
        """
        return math.sqrt(self.haste * self.model.prefill_ms)


@dataclass(frozen=True)
class Pool:
    """Replicas, a whole number of them or not, that one kind has for itself.  Rates are of all of them together."""

    kind: Kind
    num_replicas: float
    max_rate: float  # of one replica
    encoders: Encoders
    offered: float
    carried: float

    @property
    def prompts(self) -> Prompts:
        return self.kind.model.prompts

    def share_of(self, modality: str) -> float:
        """Of the pool's requests."""
        return float(self.prompts.share[self.prompts.of(modality)].sum())

    @cached_property
    def now(self) -> Moment:
        return self._moment(self.carried)

    @cached_property
    def burst(self) -> Moment:
        """At the load that is exceeded 1 % of the time: rows are normally distributed, as wide as the peakedness of the arrivals says."""
        num_rows = max(self.now.load.rows * self.num_replicas, 1.0)
        excess = P99_SIGMAS * math.sqrt(self.kind.model.workload.peakedness(self.kind.share) / num_rows)
        return self._moment(min(self.carried * (1 + excess), self.max_rate * self.num_replicas))

    def typical_ttft_s(self) -> Array:
        """[N] of each prompt, all else being at its median.

        A request waits for the step that runs and the one that was sent ahead, then for others' prefills, and takes its own.  It goes where
        there is least to do: unless all replicas are busy with prompts, or full, the two steps only decode.  Where nobody is refused there
        are rows in other pools; else it waits until one ends at its replica.
        """
        load, wait, max_rows = self.now.load, self.now.wait, self.kind.model.max_rows
        refuses = self.carried < REFUSING * self.offered
        full = Wait(waiting_chance(load.rows / max_rows, self.num_replicas * max_rows) if refuses else 0.0, 1 / load.rate)
        busy = max(wait.chance, full.chance)
        steps_s = (1 - busy) * 1.5 * load.decode_step_s + busy * (load.residual_s + load.mean_step_s)
        waits_s = (min(each.quantile_s(0.5), MAX_QUEUE_WAIT_S) for each in (full, wait))
        return self.now.media_s + load.prefill_s + steps_s + sum(waits_s)

    def ttft_p99_s(self, modality: str) -> float:
        """Estimate: in a burst, the mean, and the root of the sum of squares by which the p99s of what the request itself brings, and of
        its wait, exceed their means."""
        chosen = self.prompts.of(modality)
        weights = self.prompts.share[chosen]
        load, wait = self.burst.load, self.burst.wait
        own_s = (self.burst.media_s + load.prefill_s)[chosen]
        mean_own_s = float(weights @ own_s) / float(weights.sum())
        mean_wait_s = min(wait.chance * wait.mean_s, MAX_QUEUE_WAIT_S)
        excesses = quantile(own_s, weights, 0.99) - mean_own_s, min(wait.quantile_s(0.99), MAX_QUEUE_WAIT_S) - mean_wait_s
        return load.residual_s + load.mean_step_s + mean_own_s + mean_wait_s + math.hypot(*excesses)

    def _moment(self, rate: float) -> Moment:
        model = self.kind.model
        load = model.at(rate / self.num_replicas)
        scv = model.workload.arrival_scv(self.kind.share, load.prefill_share)
        return Moment(load, wait_of(load, self.num_replicas, scv), self.encoders.delay_s(self.prompts, rate))


@dataclass(frozen=True)
class Outcome:
    """What the replicas of one decoder make of a rate."""

    pools: tuple[Pool, ...]

    @property
    def offered(self) -> float:
        return sum(pool.offered for pool in self.pools)

    @property
    def carried(self) -> float:
        return sum(pool.carried for pool in self.pools)

    @property
    def encoder_load(self) -> float:
        """Cards that are busy encoding."""
        return sum(pool.carried * pool.prompts.mean(pool.encoders.work_s(pool.prompts)) for pool in self.pools)

    @property
    def tpot_p50_s(self) -> float:
        """The mean over answers, which lie about their pool's mean."""
        return sum(pool.carried * pool.now.load.mean_step_s for pool in self.pools) / self.carried

    @property
    def tpot_p99_s(self) -> float:
        """Estimate: the slowest pool in a burst."""
        return max(pool.burst.load.mean_step_s for pool in self.pools)

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those that come."""
        return tuple(name for name in MODALITIES if self.pools_of(name))

    def pools_of(self, modality: str) -> tuple[Pool, ...]:
        """Those that have some of it."""
        return tuple(pool for pool in self.pools if pool.prompts.of(modality).any())

    def offered_of(self, modality: str) -> float:
        """Requests a second."""
        return sum(pool.offered * pool.share_of(modality) for pool in self.pools)

    def carried_of(self, modality: str) -> float:
        """Requests a second: a pool refuses all that it has alike."""
        return sum(pool.carried * pool.share_of(modality) for pool in self.pools)

    def ttft_s(self, modality: str) -> tuple[float, float]:
        """p50 of the answers, and an estimate of the p99: that of the pool where it is longest."""
        pools = self.pools_of(modality)
        times_s = np.concatenate([pool.typical_ttft_s()[pool.prompts.of(modality)] for pool in pools])
        weights = np.concatenate([pool.carried * pool.prompts.share[pool.prompts.of(modality)] for pool in pools])
        return quantile(times_s, weights, 0.5), max(pool.ttft_p99_s(modality) for pool in pools)

    def tpot_s(self, modality: str) -> tuple[float, float]:
        """Mean over the answers, and an estimate of the p99: that of the slowest pool in a burst."""
        pools = self.pools_of(modality)
        total_s = sum(pool.carried * pool.share_of(modality) * pool.now.load.mean_step_s for pool in pools)
        return total_s / self.carried_of(modality), max(pool.burst.load.mean_step_s for pool in pools)


@dataclass(frozen=True)
class Kinds:
    """What one decoder's replicas get: in kinds, and all of it together."""

    text: tuple[Kind, ...]
    media: tuple[Kind, ...]  # one or none
    all: Kind

    @property
    def apart(self) -> tuple[Kind, ...]:
        return self.text + self.media


def kinds_of(decoder: Decoder, workload: Workload) -> Kinds:
    def kind(name: str, prompts: Prompts, modalities: tuple[str, ...], part: float = 1.0, haste: float = 1.0) -> Kind:
        share = part * sum(workload.shares.get(each, 0.0) for each in modalities)
        return Kind(name, ReplicaModel(decoder, workload, prompts), share, haste)

    text, media = prompts_of(workload, MODALITIES[:1]), prompts_of(workload, MODALITIES[1:])
    halves = text.halves() if len(text.share) > 1 else (text,) if len(text.share) else ()
    names = ("short text", "long text") if len(halves) > 1 else ("text",)
    return Kinds(
        tuple(kind(name, half, MODALITIES[:1], 1 / len(halves)) for name, half in zip(names, halves, strict=False)),
        (kind("media", media, MODALITIES[1:], haste=MEDIA_HASTE),) if len(media.share) else (),
        kind("all", prompts_of(workload), MODALITIES),
    )


@dataclass(frozen=True)
class Replicas:
    """`num_replicas` of a decoder, beside encoders."""

    kinds: Kinds
    num_replicas: int
    encoders: Encoders

    def at(self, rate: float) -> Outcome:
        """What becomes of `rate` requests a second."""
        if self.num_replicas == 1:
            model = self.kinds.all.model
            return Outcome((self._pool(self.kinds.all, rate, 1.0, model.max_rate),))
        max_rates = {kind.name: kind.model.rate_at(self._cap(kind) / kind.weight) for kind in self.kinds.apart}
        return Outcome(
            tuple(
                self._pool(kind, rate * kind.share, count, max_rates[kind.name])
                for kind, count in zip(self.kinds.apart, self._counts(rate), strict=True)
            )
        )

    def _counts(self, rate: float) -> list[float]:
        """Replicas of each kind.  All have what they need to carry the same harm; if that is too much, text comes before media."""
        kinds = self.kinds

        def needed(kind: Kind, harm: float) -> float:
            rows = max(min(harm, self._cap(kind)) / kind.weight, MIN_ROWS)
            return rate * kind.share / kind.model.rate_at(rows)

        def spare(harm: float) -> float:
            return self.num_replicas - sum(needed(kind, harm) for kind in kinds.apart)

        most = max(map(self._cap, kinds.apart))
        if spare(most) >= 0:
            harm = root(spare, 0.0, most)
            counts = [needed(kind, harm) for kind in kinds.apart]
            return [count * self.num_replicas / sum(counts) for count in counts]
        of_text = sum(needed(kind, most) for kind in kinds.text)
        of_media = sum(needed(kind, most) for kind in kinds.media)
        of_media = max(self.num_replicas - of_text, min(1.0, of_media)) if kinds.media else 0.0
        scale = (self.num_replicas - of_media) / of_text if of_text else 0.0
        return [scale * needed(kind, most) for kind in kinds.text] + [of_media] * len(kinds.media)

    def _cap(self, kind: Kind) -> float:
        """Harm at which a kind takes no more.  All text is refused by one queue: as soon as the replicas of short ones are full."""
        caps = [each.weight * each.model.most_rows for each in (self.kinds.text if kind in self.kinds.text else (kind,))]
        return min(caps)

    def _pool(self, kind: Kind, rate: float, num_replicas: float, max_rate: float) -> Pool:
        """With as much of `rate` as rows, prefill and encoders carry, less who would wait too long."""
        model = kind.model
        most = min(rate, max_rate * num_replicas, self.encoders.max_rate(model.prompts))

        def excess(carried: float) -> float:
            """Of what would be carried over what was taken."""
            load = model.at(carried / num_replicas)
            wait = wait_of(load, num_replicas, model.workload.arrival_scv(kind.share, load.prefill_share))
            return carried - rate * (1 - wait.exceeds(MAX_QUEUE_WAIT_S))

        return Pool(kind, num_replicas, max_rate, self.encoders, rate, root(excess, 0.0, most))
