"""All ways to cut up a box, the best of them for a mix, and how many boxes a rate takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mmserve.planner.box import Encoders, Kinds, Outcome, Replicas, kinds_of
from mmserve.planner.replica_load import Decoder, root
from mmserve.planner.workload import MODALITIES, Workload

NUM_RANKS = (1, 2, 4, 8)
MAX_ENCODERS = 4  # of a box's cards; more have never been the best
MIN_RATE = 0.5  # requests a second: a box that carries fewer is of no use


@dataclass(frozen=True, slots=True)
class Slo:
    """What every answer is promised.  Seconds."""

    text_ttft_p50_s: float = 0.4
    media_ttft_p99_s: float = 0.9
    tpot_p50_s: float = 0.035
    shed_share: float = 0.01  # of a decoder's requests, at most, for a rate to count as carried


@dataclass(frozen=True, slots=True)
class Part:
    """Replicas of one decoder in a box."""

    name: str  # small or large
    num_replicas: int
    num_ranks: int  # cards of each

    def __str__(self) -> str:
        return f"{self.num_replicas} {self.name}" + (f" (tp {self.num_ranks})" if self.num_ranks > 1 else "")


@dataclass(frozen=True, slots=True)
class Split:
    parts: tuple[Part, ...]
    num_encoders: int

    @property
    def num_gpus(self) -> int:
        return sum(part.num_replicas * part.num_ranks for part in self.parts) + self.num_encoders

    def __str__(self) -> str:
        encoders = f"{self.num_encoders} encoder{'s' if self.num_encoders > 1 else ''}"
        return " + ".join([*map(str, self.parts), *([encoders] if self.num_encoders else [])])


@dataclass(frozen=True)
class Demand:
    """What is asked of a fleet, and what its decoders are, by name and by the number of cards that each of them is spread over."""

    workload: Workload
    decoders: Mapping[str, Mapping[int, Decoder]]
    shares: Mapping[str, float]  # of the requests, by decoder, adding up to 1
    slo: Slo = field(default_factory=Slo)
    num_gpus: int = 8  # of a box

    @cached_property
    def kinds(self) -> dict[tuple[str, int], Kinds]:
        """Of decoders whose weights, and at least one sequence of every kind, fit into their cards."""
        found = {}
        for name, by_ranks in self.decoders.items():
            for num_ranks, decoder in by_ranks.items():
                try:
                    kinds = kinds_of(decoder, self.workload)
                    fits = all(kind.model.max_rows >= 1 for kind in kinds.apart)
                except ValueError:
                    continue
                if fits:
                    found[name, num_ranks] = kinds
        return found

    @property
    def has_media(self) -> bool:
        return any(self.workload.shares.get(name, 0.0) for name in MODALITIES[1:])

    def splits(self) -> Iterator[Split]:
        """That leave no card idle and give each decoder at least one replica, and media at least one encoder."""
        for num_encoders in range(1, min(MAX_ENCODERS, self.num_gpus - 1) + 1) if self.has_media else (0,):
            for parts in self._parts(tuple(self.shares), self.num_gpus - num_encoders):
                yield Split(parts, num_encoders)

    def _parts(self, names: tuple[str, ...], num_gpus: int) -> Iterator[tuple[Part, ...]]:
        name, *others = names
        for num_ranks in (ranks for each, ranks in self.kinds if each == name):
            counts = range(1, num_gpus // num_ranks + 1) if others else (num_gpus // num_ranks,)
            for count in counts:
                left = num_gpus - count * num_ranks
                if count and others:
                    yield from ((Part(name, count, num_ranks), *rest) for rest in self._parts(tuple(others), left))
                elif count and not left:
                    yield (Part(name, count, num_ranks),)


@dataclass(frozen=True)
class Box:
    """One box, cut up that way."""

    demand: Demand
    split: Split

    @cached_property
    def replicas(self) -> dict[str, Replicas]:
        """By decoder.  Each has its share of the encoders' time."""
        shares, num_encoders = self.demand.shares, self.split.num_encoders
        found = {}
        for part in self.split.parts:
            kinds = self.demand.kinds[part.name, part.num_ranks]
            encoders = Encoders(kinds.all.model.decoder.card, num_encoders * shares[part.name])
            found[part.name] = Replicas(kinds, part.num_replicas, encoders)
        return found

    def at(self, rate: float) -> dict[str, Outcome]:
        """What becomes of `rate` requests a second, by decoder."""
        return {name: replicas.at(rate * self.demand.shares[name]) for name, replicas in self.replicas.items()}

    def broken(self, outcomes: Mapping[str, Outcome]) -> dict[tuple[str, str], str]:
        """Which promise is not kept to whom of those that are taken, by decoder and modality."""
        slo = self.demand.slo
        found = {}
        for name, outcome in outcomes.items():
            for modality in outcome.modalities:
                p50_s, p99_s = outcome.ttft_s(modality)
                if outcome.tpot_p50_s > slo.tpot_p50_s:
                    found[name, modality] = f"TPOT p50, {name}"
                elif modality == "text" and p50_s > slo.text_ttft_p50_s:
                    found[name, modality] = f"TTFT p50 of text, {name}"
                elif modality != "text" and p99_s > slo.media_ttft_p99_s:
                    found[name, modality] = f"TTFT p99 of {modality}, {name}"
        return found

    @cached_property
    def limit(self) -> tuple[float, str]:
        """Requests a second that are carried inside all promises, and what would break beyond that."""
        reasons: dict[float, str] = {}

        def bad(rate: float) -> float:
            outcomes = self.at(rate)
            broken = self.broken(outcomes)
            least = 1 - self.demand.slo.shed_share
            if broken:
                reasons[rate] = next(iter(broken.values()))
            elif refusing := [name for name, outcome in outcomes.items() if outcome.carried < least * outcome.offered]:
                reasons[rate] = f"{' and '.join(refusing)}: too many refused"
            return 1.0 if rate in reasons else -1.0

        models = {name: replicas.kinds.all.model for name, replicas in self.replicas.items()}
        most = 2 * max(part.num_replicas * models[part.name].max_rate / self.demand.shares[part.name] for part in self.split.parts)
        carried = root(bad, 0.0, most, num_halvings=14)
        return (carried if carried >= MIN_RATE else 0.0), reasons[min(rate for rate in reasons if rate > carried)]

    def goodput(self, rate: float) -> float:
        """Of `rate` requests a second, those answered that the promises are kept to."""
        outcomes = self.at(rate)
        broken = self.broken(outcomes)
        return sum(
            outcome.carried_of(modality)
            for name, outcome in outcomes.items()
            for modality in outcome.modalities
            if (name, modality) not in broken
        )


def ranked(demand: Demand) -> list[Box]:
    """All splits, the one that carries most first; of equals the one with fewer encoders.  Raises ValueError if there is none."""
    boxes = [Box(demand, split) for split in demand.splits()]
    if not boxes:
        raise ValueError("no split of the box has room for the weights")
    return sorted(boxes, key=lambda box: (-round(box.limit[0], 1), box.split.num_encoders))


def num_boxes(box: Box, rate: float) -> int | None:
    """That carry `rate` inside all promises together; None if not even one request is."""
    carried, _ = box.limit
    return math.ceil(rate / carried - 1e-9) if carried else None
