"""What requests carry, as distributions, and these as a few hundred weighted prompts that stand for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, product
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

MODALITIES = ("text", "image", "audio", "image_audio")
BLEND: Mapping[str, float] = {"text": 0.50, "image": 0.35, "audio": 0.10, "image_audio": 0.05}
PICTURE_PIXELS: Mapping[int, float] = {640 * 480: 0.40, 1600 * 1200: 0.30, 2592 * 1944: 0.25, 4000 * 3000: 0.05}
STRIDE = 16  # tokens in a hash of the prefix cache: what a repeat computes again is less than that, and at least one
NUM_LENGTHS = 8  # of text, and of clips, that stand for all
MIN_SHARE = 1e-12  # of a prompt that stands for any
P99_PROMPT = 2048  # tokens: the 99th percentile of real traffic is no less


@dataclass(frozen=True, slots=True)
class Workload:
    """The defaults are those of the simulator's traffic.  Spreads are standard deviations of the logarithm; 0: all are the same."""

    shares: Mapping[str, float] = field(default_factory=lambda: dict(BLEND))  # by modality, adding up to 1
    system_tokens: int = 48  # at the head of every prompt of a tenant: always in the prefix cache
    mean_text: float = 300.0  # tokens
    text_spread: float = 0.6
    picture_tokens: int = 576
    picture_counts: tuple[float, ...] = (0.90, 0.08, 0.02)  # shares of one, two ... in requests that have any
    picture_pixels: Mapping[int, float] = field(default_factory=lambda: dict(PICTURE_PIXELS))  # shares of the sizes
    median_clip_s: float = 12.0
    clip_spread: float = 0.7
    clip_bounds_s: tuple[float, float] = (3.0, 60.0)
    audio_tokens_per_s: float = 25.0
    mean_answer: float = 250.0  # tokens
    answer_spread: float = 0.8
    repeat_rate: float = 0.2  # share of requests about something that was there before; half of these behind other words
    tenant_scv: float = 8.2  # squared coefficient of variation of the gaps between one tenant's requests; 1: Poisson
    num_tenants: float = 9.9  # 1 / sum of squared shares: thirty with Zipf rates are as many as ten equal ones

    def __post_init__(self) -> None:
        if not math.isclose(sum(self.shares.values()), 1.0) or not set(self.shares) <= set(MODALITIES):
            raise ValueError(f"shares of {', '.join(MODALITIES)} must add up to 1, got {dict(self.shares)}")

    @property
    def mean_answer_position(self) -> float:
        """Tokens of its answer that a row, seen at a random moment, has behind it: long answers are seen for longer."""
        return self.mean_answer * math.exp(self.answer_spread**2) / 2

    def arrival_scv(self, share: float, utilization: float) -> float:
        """Of the gaps between requests of a `share` of the traffic, as a queue at that utilization notices it.

        Many bursty tenants together look like a Poisson process to a queue that is soon empty again, and as bursty as each of them to one
        that hardly ever is: the superposition rule of Whitt, "The Queueing Network Analyzer" (1983), after thinning.
        """
        weight = 1 / (1 + 4 * (1 - utilization) ** 2 * (self.num_tenants - 1))
        return 1 + weight * share * (self.tenant_scv - 1)

    def peakedness(self, share: float) -> float:
        """Variance over mean of how many of a `share` of the requests are there at once, were there room for all of them."""
        return 1 + share * (self.tenant_scv - 1) / 2

    def with_shares(self, shares: Mapping[str, float]) -> Workload:
        """The same with another mix, scaled to add up to 1."""
        total = sum(shares.values())
        return replace(self, shares={name: share / total for name, share in shares.items() if share > 0})


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that stand for all.  Float64 [N] each."""

    share: Array  # adding up to 1
    modality: Array  # index into MODALITIES
    num_tokens: Array  # fused
    num_new: Array  # of these, not found in the prefix cache
    num_encodes: Array  # pictures that are in no cache
    encode_audio_s: Array  # seconds of sound that are in no cache
    decode_s: Array  # of the slowest of its media, on one core

    def mean(self, values: Array) -> float:
        return float(self.share @ values)

    def of(self, modality: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[N] which of them are of one modality."""
        return np.equal(self.modality, MODALITIES.index(modality))

    def halves(self) -> tuple[Prompts, ...]:
        """The shorter ones and the longer ones, as many requests each."""
        order = np.argsort(self.num_tokens, kind="stable")
        table = np.stack([getattr(self, each.name) for each in fields(self)])[:, order]
        below = np.clip((0.5 - (np.cumsum(table[0]) - table[0])) / table[0], 0.0, 1.0)  # part of each that is in the first half
        found = []
        for part in (below, 1 - below):
            half = table[:, part > 0]
            half[0] *= 2 * part[part > 0]
            found.append(Prompts(*half))
        return tuple(found)


def quantile(values: Array, weights: Array, q: float) -> float:
    """Of values that stand for slices of a distribution: halfway between neighbours at their common edge, the last one at the end."""
    order = np.argsort(values)
    middles = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(q * weights.sum(), middles, values[order]))


DECODE_S_PER_PIXEL = 12e-9  # JPEG to resized RGB, one core
DECODE_S_PER_CLIP_S = 1.5e-3  # to mono at 16 kHz, one core


def prompts_of(workload: Workload, modalities: Sequence[str] = MODALITIES) -> Prompts:
    """Those of some modalities, as if there were no others.  Empty if none has a share."""
    rows = [row for name in modalities if workload.shares.get(name, 0.0) > 0 for row in _rows(workload, name)]
    table = np.array(rows, dtype=np.float64).reshape(-1, 7)
    table[:, 0] /= table[:, 0].sum() or 1.0
    return Prompts(*table.T)


def _rows(workload: Workload, modality: str) -> list[tuple[float, ...]]:
    """In the order of the fields of Prompts."""
    index = MODALITIES.index(modality)
    texts = _lognormal(workload.mean_text, workload.text_spread)
    counts, sizes, clips = [(0, 1.0)], [(0, 1.0)], [0.0]
    if "image" in modality:
        counts = [(1 + i, share) for i, share in enumerate(workload.picture_counts)]
        sizes = list(workload.picture_pixels.items())
    if "audio" in modality:
        low, high = workload.clip_bounds_s
        mean_s = workload.median_clip_s * math.exp(workload.clip_spread**2 / 2)
        clips = [min(max(clip_s, low), high) for clip_s in _lognormal(mean_s, workload.clip_spread)]
    half = workload.repeat_rate / 2
    rows: list[tuple[float, ...]] = []
    for text, (count, count_share), (pixels, size_share), clip_s in product(texts, counts, sizes, clips):
        share = workload.shares[modality] * count_share * size_share / len(texts) / len(clips)
        own = text + count * workload.picture_tokens + clip_s * workload.audio_tokens_per_s
        decode_s = max(pixels * DECODE_S_PER_PIXEL, clip_s * DECODE_S_PER_CLIP_S)
        total = workload.system_tokens + own
        rows.append((share * (1 - 2 * half), index, total, own, count, clip_s, decode_s))
        rows.append((share * half, index, total, own, 0.0, 0.0, 0.0))  # behind other words: the rows of its media are there
        rows.append((share * half, index, total, min(own, STRIDE / 2), 0.0, 0.0, 0.0))
    return [row for row in rows if row[0] > MIN_SHARE]


def _lognormal(mean: float, spread: float) -> list[float]:
    """Means of equally likely slices: their mean is the distribution's."""
    if spread == 0:
        return [mean]
    normal = NormalDist()
    edges = [-math.inf, *(normal.inv_cdf(i / NUM_LENGTHS) for i in range(1, NUM_LENGTHS)), math.inf]
    below = [normal.cdf(edge - spread) for edge in edges]
    return [mean * NUM_LENGTHS * (high - low) for low, high in pairwise(below)]


def p99_prompt(workload: Workload) -> int:
    """Tokens of the largest usual prompt: that of the mix, but no less than in real traffic."""
    prompts = prompts_of(workload)
    return max(P99_PROMPT, math.ceil(quantile(prompts.num_tokens, prompts.share, 0.99)))
