"""What plans ask of a simulated device, in the units that its time is reckoned in."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mmserve.media import MediaKind
from mmserve.plan import EncodeItem, StepPlan
from mmserve.roofline.hardware import CARDS, Card
from mmserve.roofline.timing import StepWork

SAMPLE_RATE = 16_000  # Hz, what clips are encoded at


def card_of(device: str) -> Card:
    """`sim:a100:3` -> an A100.  The name was checked when it was parsed as a setting."""
    return CARDS[device.split(":")[1]]


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


def amount_of(kind: MediaKind, items: Iterable[EncodeItem]) -> float:
    """Tiles, or seconds of audio: the first dimension of what is encoded says it."""
    total = sum(item.features.shape[0] for item in items)
    return total if kind is MediaKind.IMAGE else total / SAMPLE_RATE
