"""One decoder under load, in the mean: how many rows at a rate, how long its steps, how late first tokens, and the most it carries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmserve.planner.workload import Array, Prompts, Workload
from mmserve.roofline.hardware import Card, DecoderShape
from mmserve.roofline.timing import PUBLISHED_FIT, Efficiencies, StepWork, kv_tokens, step_s
from mmserve.scheduler.scheduler import STEP_SHARE
from mmserve.scheduler.step_budget import PREFILL_FLOOR

NUM_HALVINGS = 30  # when a root is looked for
NUM_POINTS = 97  # numbers of rows for which the rate is computed; between them it is all but straight
NUM_FILLINGS = 9  # of a step, the same for its time


@dataclass(frozen=True)
class Decoder:
    """One replica: `num_ranks` cards that hold one decoder.  Raises ValueError, when its room is asked for, if the weights don't fit."""

    shape: DecoderShape
    card: Card
    num_ranks: int = 1
    reached: Efficiencies = PUBLISHED_FIT
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 1024
    tpot_target_s: float = 0.035
    block_size: int = 256
    memory_utilization: float = 0.9

    @cached_property
    def kv_tokens(self) -> int:
        blocks = kv_tokens(self.shape, self.card, self.memory_utilization, self.num_ranks) // self.block_size
        return blocks * self.block_size

    def step_s(self, rows: float, context: float, prefill: float = 0.0, prefill_context: float = 0.0) -> float:
        """A step of so many decodes, each looking back on `context` tokens, and so many tokens of prompts."""
        work = StepWork(rows + (prefill > 0), rows + prefill, rows, rows * context, prefill * prefill_context)
        return step_s(work, self.shape, self.card, self.num_ranks, self.reached)

    def num_rows_that_fit(self, tokens_per_row: float) -> float:
        """Half of the last block of a row is empty."""
        return self.kv_tokens / (tokens_per_row + self.block_size / 2)


@dataclass(frozen=True, slots=True)
class Load:
    """A decoder that takes `rate` requests a second, in the mean over time."""

    rate: float
    rows: float  # sequences that decode
    mean_step_s: float  # and so the time per output token
    decode_step_s: float  # of steps without prefill
    residual_s: float  # until the step that runs just now is over, for who comes at a random moment
    prefill_share: float  # of the time, in steps with prefill
    prefill_s: Array  # [N] from a prompt's first step to its first token, for each of Prompts
    prefill_scv: float  # squared coefficient of variation of these


@dataclass(frozen=True, slots=True)
class _Steps:
    """What follows from the rows alone.  Times in seconds."""

    rows: float
    decode_s: float  # of a step without prefill
    full_s: float  # of one with as much as the scheduler allows
    num_full: Array  # [N] full steps of a prompt
    last_s: Array  # [N] of the step with what is left then, if anything
    num_alone: float  # steps of a prompt, on average, that has nobody behind it: its last one is part empty
    alone_s: float  # these together
    num_queued: float  # steps of a prompt, on average, that shares its last one with who comes next


@dataclass(frozen=True)
class ReplicaModel:
    """A decoder and the prompts that it gets."""

    decoder: Decoder
    workload: Workload
    prompts: Prompts

    @cached_property
    def context(self) -> float:
        """Tokens that a row looks back on, on average."""
        return self.prompts.mean(self.prompts.num_tokens) + self.workload.mean_answer_position

    @cached_property
    def max_rows(self) -> float:
        """By the scheduler's limit, and by the KV cache."""
        return min(self.decoder.max_num_seqs, self.decoder.num_rows_that_fit(self.context))

    @property
    def max_rate(self) -> float:
        """Requests a second at most: the rows are used up, or every step is full of prefill.

        In the latter case it is B / (S_out * t_step) at the largest B whose step keeps the target.
        """
        return float(self._curve[1][-1])

    @property
    def prefill_ms(self) -> float:
        """GPU-ms of an average prompt, as the scheduler's placement reckons it: without what a step takes anyway."""
        slope_s = self.decoder.step_s(0.0, 0.0, 1024.0) - self.decoder.step_s(0.0, 0.0, 512.0)
        return 1e3 * slope_s / 512 * self.prompts.mean(self.prompts.num_new)

    def rows_at(self, rate: float) -> float:
        """Sequences that decode at once; beyond `max_rate` as many as ever."""
        rows, rates = self._curve
        return float(np.interp(rate, rates, rows))

    @property
    def most_rows(self) -> float:
        """Sequences that decode at `max_rate`."""
        return float(self._curve[0][-1])

    def rate_at(self, rows: float) -> float:
        """Requests a second that keep so many rows busy."""
        return float(np.interp(rows, *self._curve))

    def at(self, rate: float) -> Load:
        """At `max_rate` beyond that."""
        rate = min(rate, self.max_rate)
        steps = self._steps(self.rows_at(rate))
        share = _prefill_share(steps, rate)
        squares_s2 = self.prompts.mean(steps.num_full * steps.full_s**2 + steps.last_s**2)
        prefill_s = steps.num_full * steps.full_s + steps.last_s
        return Load(
            rate=rate,
            rows=steps.rows,
            mean_step_s=1 / _steps_per_s(steps, rate),
            decode_step_s=steps.decode_s,
            residual_s=min((rate * squares_s2 + (1 - share) * steps.decode_s) / 2, steps.full_s),
            prefill_share=share,
            prefill_s=prefill_s,
            prefill_scv=self.prompts.mean((prefill_s / steps.alone_s - 1) ** 2),
        )

    def mean_step_s(self, rows: float, rate: float) -> float:
        """Where so many rows are seen at that rate, whatever keeps them."""
        return 1 / _steps_per_s(self._steps(rows), rate)

    @cached_property
    def _curve(self) -> tuple[Array, Array]:
        """Rows and the rate that keeps them busy, as far as more rows carry more."""
        rows = np.linspace(0.0, self.max_rows, NUM_POINTS)
        rates = np.array([_rate_at(self._steps(float(each)), self.workload.mean_answer) for each in rows])
        most = int(np.argmax(rates)) + 1
        return rows[:most], rates[:most]

    def _steps(self, rows: float) -> _Steps:
        decoder, mean = self.decoder, self.prompts.mean
        new = self.prompts.num_new
        looks_back = mean(new * (self.prompts.num_tokens - new / 2)) / mean(new)

        def seconds(prefill: float) -> float:
            return decoder.step_s(rows, self.context, prefill, looks_back)

        most = max(decoder.max_num_batched_tokens - rows, 1.0)
        target_s = STEP_SHARE * decoder.tpot_target_s if rows >= 1 else math.inf  # nobody waits for the next token
        chunk = max(root(lambda prefill: seconds(prefill) - target_s, 0.0, most), min(float(PREFILL_FLOOR), most))
        num_full = np.floor(new / chunk)
        left = new - num_full * chunk
        grid = np.linspace(0.0, chunk, NUM_FILLINGS)
        times = [seconds(filling) for filling in grid]
        last_s = np.where(left > 0, np.interp(left, grid, times), 0.0)
        return _Steps(
            rows=rows,
            decode_s=times[0],
            full_s=times[-1],
            num_full=num_full,
            last_s=last_s,
            num_alone=mean(num_full) + mean(np.ceil(left / chunk)),
            alone_s=mean(num_full) * times[-1] + mean(last_s),
            num_queued=mean(new) / chunk,
        )


def _rate_at(steps: _Steps, answer: float) -> float:
    """Requests a second, with answers of so many tokens, that keep so many rows busy; or less if there is no time to prefill as many."""
    most = 1 / (steps.num_queued * steps.full_s)  # every step is full
    return root(lambda rate: rate * answer - steps.rows * _steps_per_s(steps, rate), 0.0, most)


def _steps_per_s(steps: _Steps, rate: float) -> float:
    share = _prefill_share(steps, rate)
    return rate * (share * steps.num_queued + (1 - share) * steps.num_alone) + (1 - share) / steps.decode_s


def _prefill_share(steps: _Steps, rate: float) -> float:
    """Of the time, in steps with prefill: the share of prompts that have others behind them, too."""
    return min(1.0, rate * steps.alone_s / (1 + rate * (steps.alone_s - steps.num_queued * steps.full_s)))


@dataclass(frozen=True, slots=True)
class Wait:
    """For the first step of a prefill: exponential, if there is any."""

    chance: float
    mean_s: float  # of those who wait

    def exceeds(self, seconds: float) -> float:
        """The share that waits longer."""
        return self.chance * math.exp(-seconds / self.mean_s) if self.mean_s > 0 else 0.0

    def quantile_s(self, q: float) -> float:
        return self.mean_s * math.log(self.chance / (1 - q)) if self.chance > 1 - q else 0.0


def wait_of(load: Load, num_replicas: float, arrival_scv: float) -> Wait:
    """At `num_replicas` that share what comes, each with that load."""
    share = min(load.prefill_share, 1 - 1e-6)
    service_s = share / load.rate if load.rate else 0.0
    chance = waiting_chance(share, num_replicas)
    return Wait(chance, service_s / (num_replicas * (1 - share)) * (arrival_scv + load.prefill_scv) / 2)


def waiting_chance(utilization: float, num_servers: float) -> float:
    """That all of them are busy: Sakasegawa's, which needs no whole number."""
    return float(min(utilization, 1.0) ** (math.sqrt(2 * (num_servers + 1)) - 1))


def root(function: Callable[[float], float], low: float, high: float, num_halvings: int = NUM_HALVINGS) -> float:
    """Where a rising function crosses zero, or `high` where it does not."""
    if function(high) <= 0:
        return high
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return low
