"""When each request arrives and what it carries, drawn from a seed.  Pure: no clock, no network, no bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

POOL_SIZE = 64  # subjects of each modality that repeats are drawn from
_ARRIVALS, _SUBJECTS = 0, 1  # independent random streams, so that the same arrivals can carry something else


class Modality(StrEnum):
    """What a request has beside text; the names of the server's metric labels."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    IMAGE_AUDIO = "image_audio"

    @property
    def has_image(self) -> bool:
        return self in (Modality.IMAGE, Modality.IMAGE_AUDIO)

    @property
    def has_audio(self) -> bool:
        return self in (Modality.AUDIO, Modality.IMAGE_AUDIO)


@dataclass(frozen=True, slots=True)
class Traffic:
    """`repeat_rate` of the requests take their subject from a Zipf pool; half of those come behind text of their own."""

    num_prompts: int
    request_rate: float  # requests a second; inf: all at once
    burstiness: float  # shape of the gamma distributed gaps: 1 is a Poisson process, less comes in bursts
    mix: Mapping[Modality, float]  # shares that add up to 1
    repeat_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    arrival_s: float  # after the start of the run
    modality: Modality
    subject: int  # requests of one modality and subject carry the same words and media
    lead: int | None  # words of its own in front, which make the rest miss the prefix cache; None: nothing in front


def plan_requests(traffic: Traffic) -> tuple[PlannedRequest, ...]:
    """The whole load in order of arrival.  What is carried doesn't depend on the rate."""
    arrivals = arrival_times(traffic)
    draw = np.random.default_rng([traffic.seed, _SUBJECTS])
    kinds = draw.choice(len(traffic.mix), size=traffic.num_prompts, p=list(traffic.mix.values()))
    repeats = draw.random(traffic.num_prompts) < traffic.repeat_rate
    ranks = draw.choice(POOL_SIZE, size=traffic.num_prompts, p=zipf(POOL_SIZE))
    led = draw.random(traffic.num_prompts) < 0.5
    modalities = list(traffic.mix)
    return tuple(
        PlannedRequest(
            arrival_s=float(arrivals[index]),
            modality=modalities[kinds[index]],
            subject=int(ranks[index]) if repeats[index] else POOL_SIZE + index,
            lead=index if repeats[index] and led[index] else None,
        )
        for index in range(traffic.num_prompts)
    )


def arrival_times(traffic: Traffic) -> np.ndarray:
    """Seconds after the start, float64 [num_prompts], not falling.

    Scaled so that the last one comes at num_prompts / request_rate: short runs with unlike seeds offer the same load.
    """
    if np.isinf(traffic.request_rate):
        return np.zeros(traffic.num_prompts)
    gaps = np.random.default_rng([traffic.seed, _ARRIVALS]).gamma(traffic.burstiness, size=traffic.num_prompts)
    times: np.ndarray = np.cumsum(gaps)
    times *= traffic.num_prompts / traffic.request_rate / times[-1]
    return times


def zipf(size: int) -> np.ndarray:
    """Chances of the ranks 1, 2, ... size, each in proportion to 1 / rank; float64 [size]."""
    weights: np.ndarray = 1 / np.arange(1, size + 1)
    weights /= weights.sum()
    return weights


def parse_shares(text: str, names: Sequence[str] | None = None) -> dict[str, float]:
    """`a=.6,b=.4` or a single `a`, scaled to add up to 1.  Raises ValueError, also for a name that isn't in `names`."""
    shares: dict[str, float] = {}
    for entry in text.split(","):
        name, equals, share = entry.strip().partition("=")
        if names is not None and name not in names:
            raise ValueError(f"{name!r} is none of {', '.join(names)}")
        if not name or name in shares or (not equals and "," in text):
            raise ValueError(f"{text!r} does not look like a=.6,b=.4")
        shares[name] = float(share) if equals else 1.0
    total = sum(shares.values())
    if not (0 < total < float("inf")) or min(shares.values()) < 0:
        raise ValueError(f"the shares in {text!r} must be positive numbers")
    return {name: share / total for name, share in shares.items()}
