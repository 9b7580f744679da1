"""Puts the GPU-seconds of a step down to the sequences in it.  Pure.

A sequence is charged for each of its tokens once.  What is computed again, after a preemption, a failed step or a dead worker, is the
server's own doing and overhead.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from mmserve.scheduler.plan_builder import Row


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Of a step or of many.  The three make up what the workers measured."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    recomputed_s: float = 0.0  # charged to nobody

    def __add__(self, other: GpuTime) -> GpuTime:
        return GpuTime(self.prefill_s + other.prefill_s, self.decode_s + other.decode_s, self.recomputed_s + other.recomputed_s)


def share_out(total: float, weights: Rows[float]) -> list[float]:
    """`total` in proportion to the weights, or evenly if all are 0; the parts make it up again, but for the rounding of their sum."""
    whole = sum(weights)
    if whole <= 0:
        return [total / len(weights)] * len(weights)
    factor = total / whole
    return [factor * weight for weight in weights]


def charge(rows: Rows[Row], weights: Rows[float], gpu_s: float) -> GpuTime:
    """Share a step's GPU-seconds out over its rows, also of those who left while it ran."""
    prefill_s = decode_s = recomputed_s = 0.0
    for (sequence, start, stop, _), share_s in zip(rows, share_out(gpu_s, weights), strict=True):
        charged = sequence.num_charged
        if charged > start:
            repeated_s = share_s * (min(stop, charged) - start) / (stop - start)
            recomputed_s += repeated_s
            share_s = max(0.0, share_s - repeated_s)  # the difference of two roundings is no time
        if stop > charged:
            sequence.num_charged = stop
        if start < sequence.num_prompt:
            sequence.prefill_gpu_s += share_s
            prefill_s += share_s
        else:
            sequence.decode_gpu_s += share_s
            decode_s += share_s
    return GpuTime(prefill_s, decode_s, recomputed_s)
