"""What a step costs, learnt from the steps that were measured.  Pure.

    t = t0 + t1 * rows + a * tokens + b * pairs + c * context        milliseconds, no coefficient below zero

`pairs` is prefill tokens times the context each of them looks back on, `context` what single-token rows read of the KV cache.

Least squares with exponential forgetting over the *relative* error, solved a few sweeps of coordinate descent at a time.  A step that
took far too long (the first one, one that shared the device) then counts next to nothing: its terms are divided by its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

FORGETTING = 0.995  # of what a step taught, kept at each later one: the memory is some 200 steps
NUM_SWEEPS = 4  # of coordinate descent after a step; the next one goes on from there
PRIOR_WEIGHT = 1e-3  # of a measured step, for each coefficient as it was at the start
MIN_EVIDENCE = 1e-12  # below this nothing recent speaks of a coefficient, and it stays what it is
MAX_SPEEDUP = 4.0  # a step this many times faster than predicted counts no more than that
SLOW_DECAY = 0.95  # a step: a slow one is remembered for some dozens


class StepShape(NamedTuple):
    """What the time of a step depends on."""

    num_rows: int
    num_tokens: int
    num_pairs: float  # (prefill token, earlier token) pairs
    num_context: int  # tokens that single-token rows look back on


class Coefficients(NamedTuple):
    """Milliseconds for a step as such, and for one row, token, pair and context token in it."""

    step: float
    row: float
    token: float
    pair: float
    context: float


PRIOR = Coefficients(step=15.0, row=0.04, token=0.09, pair=4e-6, context=9e-5)
"""An 8B decoder on an A100: weights read once a step, over half of the peak in prefill, three quarters of the bandwidth in decode."""


def shape_of(ranges: Iterable[tuple[int, int]]) -> StepShape:
    """The shape of a step that computes tokens `[start, stop)` of each row."""
    num_rows = num_tokens = num_context = 0
    num_pairs = 0.0
    for start, stop in ranges:
        num_rows += 1
        num_tokens += stop - start
        if stop == start + 1:
            num_context += stop
        else:
            num_pairs += _num_pairs(start, stop)
    return StepShape(num_rows, num_tokens, num_pairs, num_context)


class CostModel:
    """Starts from `prior` and is fitted by `observe`; predictions are finite and never negative."""

    def __init__(self, prior: Coefficients = PRIOR) -> None:
        if not all(math.isfinite(each) and each > 0 for each in prior):
            raise ValueError(f"a prior must be positive, got {prior}")
        self._prior = prior
        self._scales = [1.0] * len(prior)  # coefficient as a multiple of its prior
        self._gram = [[PRIOR_WEIGHT if i == j else 0.0 for j in range(len(prior))] for i in range(len(prior))]
        self._moment = [PRIOR_WEIGHT] * len(prior)
        self.coefficients = prior
        self._most_tokens = 0  # of a step that was measured
        self._slow_ms = 0.0  # the slowest of the last steps

    def slowest_ms(self, shape: StepShape) -> float:
        """How long such a step may be thought to take: as predicted, or as long as others of late, which a prediction learns from slowly.

        Infinite for one that is larger than any that was measured: there a prediction is a guess.
        """
        return max(self.step_ms(shape), self._slow_ms) if shape.num_tokens <= 2 * self._most_tokens else math.inf

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that went through.  A worker that measures nothing says 0 seconds and teaches nothing."""
        measured_ms = seconds * 1e3
        if not (math.isfinite(measured_ms) and measured_ms > 0):
            return
        self._most_tokens = max(self._most_tokens, shape.num_tokens)
        self._slow_ms = max(measured_ms, SLOW_DECAY * self._slow_ms)
        unit_ms = max(measured_ms, self.step_ms(shape) / MAX_SPEEDUP)
        terms = [each * weight / unit_ms for each, weight in zip(self._prior, (1, *shape), strict=True)]
        target = measured_ms / unit_ms
        for i, term in enumerate(terms):
            self._moment[i] = FORGETTING * self._moment[i] + term * target
            self._gram[i] = [FORGETTING * old + term * other for old, other in zip(self._gram[i], terms, strict=True)]
        self._descend()

    def step_ms(self, shape: StepShape) -> float:
        """Predicted duration of a whole step."""
        step, row, token, pair, context = self.coefficients
        return step + row * shape.num_rows + token * shape.num_tokens + pair * shape.num_pairs + context * shape.num_context

    def row_ms(self, start: int, stop: int) -> float:
        """What tokens `[start, stop)` of a sequence add to the step they are in; 0 if there are none."""
        if stop <= start:
            return 0.0
        _, row, token, pair, context = self.coefficients
        attention = context * stop if stop == start + 1 else pair * _num_pairs(start, stop)
        return row + token * (stop - start) + attention

    def num_tokens_within(self, ms: float, start: int, most: int) -> int:
        """How many tokens from `start` on a step may compute to grow by no more than `ms`, at most `most`."""
        _, row, token, pair, _ = self.coefficients
        left_ms = ms - row
        if left_ms <= 0:
            return 0
        # The positive root of pair / 2 * n^2 + slope * n = left_ms, in the form that allows `pair` to be zero.
        slope = token + pair * start
        divisor = slope + math.sqrt(slope * slope + 2 * pair * left_ms)
        return most if divisor * most <= 2 * left_ms else int(2 * left_ms / divisor)

    def _descend(self) -> None:
        """Towards the nonnegative minimum of the squares, one coefficient at a time."""
        scales = self._scales
        for _ in range(NUM_SWEEPS):
            for i, row in enumerate(self._gram):
                if row[i] > MIN_EVIDENCE:
                    slope = self._moment[i] - sum(weight * scale for weight, scale in zip(row, scales, strict=True))
                    scales[i] = max(0.0, scales[i] + slope / row[i])
        self.coefficients = Coefficients._make(each * scale for each, scale in zip(self._prior, scales, strict=True))


def _num_pairs(start: int, stop: int) -> float:
    return (stop - start) * (start + stop) / 2
