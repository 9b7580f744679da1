"""How long a device takes, and how much it holds: a roofline with measured efficiencies.

    t_linear    = max(compute, reading the weights once)
    t_attention = KV read by decodes / bandwidth  +  (query, key) pairs of prefill / compute
    t_comm      = two all-reduces a layer
    t_step      = (t_linear + t_attention + t_comm + t0 + t1 * rows) / efficiency of the group

The efficiencies fit a published table of Llama-3.1-8B on an A100 within 4 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mmserve.media import MediaKind
from mmserve.plan import EncodeItem, StepPlan
from mmserve.sim.hardware import BF16_BYTES, Card, DecoderShape

COMPUTE = 0.81  # share of the peak that linear layers reach
WEIGHT_READ = 0.85  # share of the bandwidth, reading weights
KV_READ = 0.74  # share of the bandwidth, reading keys and values
PREFILL_ATTENTION = 0.40  # share of the peak
GROUP = 0.80  # what a tensor-parallel group loses to waiting for its slowest rank
LINK = 0.7  # share of the link's bandwidth

STEP_S = 2.7e-3  # a step as such: launches, sampling, the way through the host
ROW_S = 18e-6  # a row in it
ALL_REDUCE_S = 20e-6  # an all-reduce as such

ACTIVATION_BYTES = 2e9

SAMPLE_RATE = 16_000  # Hz, what clips are encoded at


class StepWork(NamedTuple):
    """What the time of a step depends on."""

    num_rows: int
    num_tokens: int
    num_sampled: int  # rows that reach their last token
    num_context: int  # tokens that decode rows look back on
    num_pairs: float  # (prefill token, token it looks back on)


def work_of(plan: StepPlan) -> StepWork:
    counts = np.diff(plan.query_starts).astype(np.int64)
    contexts = plan.context_lens.astype(np.int64)
    decodes = counts == 1
    prefill = counts[~decodes]
    return StepWork(
        num_rows=len(counts),
        num_tokens=int(counts.sum()),
        num_sampled=int(plan.wants_token.sum()),
        num_context=int(contexts[decodes].sum()),
        num_pairs=float((prefill * contexts[~decodes] - prefill * (prefill - 1) / 2).sum()),
    )


def step_s(work: StepWork, shape: DecoderShape, card: Card, num_ranks: int = 1) -> float:
    """Seconds that `num_ranks` cards take together for one step of a decoder."""
    flops, bandwidth = num_ranks * card.flops_per_s, num_ranks * card.bytes_per_s
    linear_flops = 2 * shape.body_params * work.num_tokens + 2 * shape.head_params * work.num_sampled
    read_bytes = (shape.body_params + shape.head_params) * BF16_BYTES
    linear = max(linear_flops / (flops * COMPUTE), read_bytes / (bandwidth * WEIGHT_READ))
    pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    attention = work.num_context * shape.kv_bytes_per_token / (bandwidth * KV_READ)
    attention += work.num_pairs * pair_flops / (flops * PREFILL_ATTENTION)
    overhead = STEP_S + ROW_S * work.num_rows
    if num_ranks == 1:
        return linear + attention + overhead
    sent_bytes = 2 * (num_ranks - 1) / num_ranks * work.num_tokens * shape.hidden_size * BF16_BYTES
    communication = 2 * shape.num_layers * (ALL_REDUCE_S + sent_bytes / (card.link_bytes_per_s * LINK))
    return (linear + attention + communication + overhead) / GROUP


def kv_tokens(shape: DecoderShape, card: Card, utilization: float, num_ranks: int = 1) -> int:
    """Tokens that the KV caches of `num_ranks` cards hold together, with that share of the memory for them, weights and activations.

    Raises ValueError if the weights alone don't fit.
    """
    free = num_ranks * (card.memory_bytes * utilization - ACTIVATION_BYTES) - shape.weight_bytes
    if free <= 0:
        memory = f"{utilization:g} of {num_ranks} x {card.memory_bytes / 1e9:.0f} GB"
        raise ValueError(f"weights of {shape.weight_bytes / 1e9:.0f} GB need more than {memory}")
    return int(free // shape.kv_bytes_per_token)


def encode_s(kind: MediaKind, amount: float, card: Card) -> float:
    """Seconds for a batch of that many tiles of pictures, or seconds of audio."""
    return amount / (card.pictures_per_s if kind is MediaKind.IMAGE else card.audio_s_per_s)


def amount_of(kind: MediaKind, items: Iterable[EncodeItem]) -> float:
    """Tiles, or seconds of audio: the first dimension of what is encoded says it."""
    total = sum(item.features.shape[0] for item in items)
    return total if kind is MediaKind.IMAGE else total / SAMPLE_RATE
