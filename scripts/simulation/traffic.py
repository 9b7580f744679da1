"""Requests as a service with many tenants sees them, drawn from a seed: when they come, what they carry, how long the answers get.

Open loop: arrivals are fixed in advance, however slow the box.  Tenants are unequal (Zipf) and come in bursts of their own (gamma).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

NUM_TENANTS = 30  # with Zipf rates the first four send half of the requests
BURSTINESS = (0.8, 4.5)  # coefficient of variation of a tenant's gaps, drawn for each
PICTURE_SIZES = ((640, 480), (1600, 1200), (2592, 1944), (4000, 3000))
PICTURE_SIZE_SHARES = (0.40, 0.30, 0.25, 0.05)
PICTURE_COUNT_SHARES = (0.90, 0.08, 0.02)  # one, two or three in a request that has any
CLIP_S = (3.0, 60.0)
CLIP_MEDIAN_S, CLIP_SPREAD = 12.0, 0.7
MEAN_TEXT, TEXT_SPREAD = 300.0, 0.6  # tokens
MEAN_ANSWER, ANSWER_SPREAD, MAX_ANSWER = 250.0, 0.8, 2000  # tokens
POOL_SIZE = 200  # subjects that come again
PART_STRIDE = 10**9  # subjects of one part of the traffic; parts share none

BLEND = {"text": 0.50, "image": 0.35, "audio": 0.10, "image_audio": 0.05}
IMAGES_ONLY = {"image": 1.0}


@dataclass(frozen=True, slots=True)
class Request:
    arrival_s: float
    tenant: str
    modality: str  # a key of BLEND
    subject: int  # below POOL_SIZE if it comes again; requests of one subject carry the same words and media
    lead: int | None  # own words in front, after which nothing is found in the prefix cache
    num_text: int  # tokens
    picture_sizes: tuple[tuple[int, int], ...]  # pixels, across and down
    clip_s: float  # 0: none
    num_answer: int  # tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rate` requests a second in [start_s, stop_s)."""

    rate: float
    start_s: float
    stop_s: float
    mix: tuple[tuple[str, float], ...] = tuple(BLEND.items())
    repeat_rate: float = 0.2
    num_tenants: int = NUM_TENANTS
    mean_answer: float = MEAN_ANSWER


def generate(parts: tuple[Traffic, ...], seed: int) -> list[Request]:
    """All parts together, by arrival."""
    requests = itertools.chain.from_iterable(_generate(part, i, seed) for i, part in enumerate(parts))
    return sorted(requests, key=lambda request: request.arrival_s)


def _generate(traffic: Traffic, part: int, seed: int) -> Iterator[Request]:
    draw = np.random.default_rng([seed, part])
    tenant_shares, pool_shares = _zipf(traffic.num_tenants), _zipf(POOL_SIZE)
    fresh = itertools.count(POOL_SIZE)
    for tenant, rate in enumerate(traffic.rate * tenant_shares):
        for arrival_s in _arrivals(rate, traffic.start_s, traffic.stop_s, draw):
            repeats = draw.random() < traffic.repeat_rate
            subject = PART_STRIDE * part + (int(draw.choice(POOL_SIZE, p=pool_shares)) if repeats else next(fresh))
            lead = int(draw.integers(2**31)) if repeats and draw.random() < 0.5 else None
            about = np.random.default_rng([seed, subject])  # so that a subject is about the same each time
            yield _request(traffic, about, draw, arrival_s=arrival_s, tenant=f"tenant-{tenant}", subject=subject, lead=lead)


def _arrivals(rate: float, start_s: float, stop_s: float, draw: np.random.Generator) -> np.ndarray:
    """Seconds, float64 [rate * span], rounded up or down by chance: how they bunch is drawn, how many there are is not."""
    span_s = stop_s - start_s
    count = int(rate * span_s + draw.random())
    shape = draw.uniform(*BURSTINESS) ** -2.0
    times = np.cumsum(draw.gamma(shape, size=count + 1))  # one gap more: the last request needn't come at the very end
    return start_s + span_s * times[:-1] / times[-1]


def _zipf(size: int) -> np.ndarray:
    shares = 1 / np.arange(1, size + 1)
    return shares / shares.sum()


def _request(
    traffic: Traffic,
    about: np.random.Generator,
    draw: np.random.Generator,
    *,
    arrival_s: float,
    tenant: str,
    subject: int,
    lead: int | None,
) -> Request:
    modality = str(about.choice([name for name, _ in traffic.mix], p=[share for _, share in traffic.mix]))
    num_pictures = 1 + int(about.choice(len(PICTURE_COUNT_SHARES), p=PICTURE_COUNT_SHARES)) if "image" in modality else 0
    sizes = tuple(PICTURE_SIZES[i] for i in about.choice(len(PICTURE_SIZES), size=num_pictures, p=PICTURE_SIZE_SHARES))
    return Request(
        arrival_s=float(arrival_s),
        tenant=tenant,
        modality=modality,
        subject=subject,
        lead=lead,
        num_text=max(8, int(_lognormal(about, MEAN_TEXT, TEXT_SPREAD))),
        picture_sizes=sizes,
        clip_s=float(np.clip(about.lognormal(np.log(CLIP_MEDIAN_S), CLIP_SPREAD), *CLIP_S)) if "audio" in modality else 0.0,
        num_answer=min(MAX_ANSWER, max(1, int(_lognormal(draw, traffic.mean_answer, ANSWER_SPREAD)))),
    )


def _lognormal(draw: np.random.Generator, mean: float, spread: float) -> float:
    return float(draw.lognormal(np.log(mean) - spread**2 / 2, spread))
