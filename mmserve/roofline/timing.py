"""How long a device takes, and how much it holds: a roofline with measured efficiencies.

    t_linear    = max(compute, reading the weights once)
    t_attention = KV read by decodes / bandwidth  +  (query, key) pairs of prefill / compute
    t_comm      = two all-reduces a layer
    t_step      = (t_linear + t_attention + t_comm + t0 + t1 * rows) / efficiency of the group

Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mmserve.media import MediaKind
from mmserve.roofline.hardware import BF16_BYTES, Card, DecoderShape

ACTIVATION_BYTES = 2e9


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What a machine reaches of a card's peaks, and what it takes beside.  The defaults fit a published table of Llama-3.1-8B on an A100
    within 4 %."""

    compute: float = 0.81  # share of the peak that linear layers reach
    weight_read: float = 0.85  # share of the bandwidth, reading weights
    kv_read: float = 0.74  # share of the bandwidth, reading keys and values
    prefill_attention: float = 0.40  # share of the peak
    group: float = 0.80  # what a tensor-parallel group loses to waiting for its slowest rank
    link: float = 0.7  # share of the link's bandwidth
    step_s: float = 2.7e-3  # a step as such: launches, sampling, the way through the host
    row_s: float = 18e-6  # a row in it
    all_reduce_s: float = 20e-6  # an all-reduce as such


PUBLISHED_FIT = Efficiencies()


class StepWork(NamedTuple):
    """What the time of a step depends on.  Planners put averages in."""

    num_rows: float
    num_tokens: float
    num_sampled: float  # rows that reach their last token
    num_context: float  # tokens that decode rows look back on
    num_pairs: float  # (prefill token, token it looks back on)


def step_s(work: StepWork, shape: DecoderShape, card: Card, num_ranks: int = 1, reached: Efficiencies = PUBLISHED_FIT) -> float:
    """Seconds that `num_ranks` cards take together for one step of a decoder."""
    flops, bandwidth = num_ranks * card.flops_per_s, num_ranks * card.bytes_per_s
    linear_flops = 2 * shape.body_params * work.num_tokens + 2 * shape.head_params * work.num_sampled
    read_bytes = (shape.body_params + shape.head_params) * BF16_BYTES
    linear = max(linear_flops / (flops * reached.compute), read_bytes / (bandwidth * reached.weight_read))
    pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    attention = work.num_context * shape.kv_bytes_per_token / (bandwidth * reached.kv_read)
    attention += work.num_pairs * pair_flops / (flops * reached.prefill_attention)
    overhead = reached.step_s + reached.row_s * work.num_rows
    if num_ranks == 1:
        return linear + attention + overhead
    sent_bytes = 2 * (num_ranks - 1) / num_ranks * work.num_tokens * shape.hidden_size * BF16_BYTES
    communication = 2 * shape.num_layers * (reached.all_reduce_s + sent_bytes / (card.link_bytes_per_s * reached.link))
    return (linear + attention + communication + overhead) / reached.group


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
