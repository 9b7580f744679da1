"""What this machine reaches of its cards' peaks, from what was measured on it.

`scripts.gpu_check` measures steps alone, so each figure says one thing.  `mmserve bench` sees steps of every kind through a whole server,
which says one thing all together: by what factor everything is slower.  A slow host and a slow device can't be told apart by it: from
0.5 to 6 requests a second, three times the time of a step as such makes answers 1.48 times as slow, at each rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmserve.planner.replica_load import Decoder, ReplicaModel
from mmserve.planner.workload import Array, Workload, prompts_of
from mmserve.roofline.hardware import BF16_BYTES
from mmserve.roofline.timing import Efficiencies

NUM_ROUNDS = 12
STEP = 1e-3  # for slopes
BENCH_KEYS = ("mean_tpot_ms", "output_throughput", "total_input_tokens", "total_output_tokens", "completed", "duration", "repeat_rate")


def refit(decoder: Decoder, reports: Sequence[Mapping[str, Any]], *, num_replicas: int = 1) -> Decoder:
    """The decoder on this machine.  Reports of both kinds may be mixed; benches were of `num_replicas` replicas of it.

    Raises ValueError for a report that is neither.
    """
    benches = []
    for report in reports:
        if "decode" in report and "prefill" in report:
            decoder = _refit_from_steps(decoder, report)
        elif all(report.get(key) is not None for key in BENCH_KEYS) and report["completed"] > 0 and report["mean_tpot_ms"] > 0:
            benches.append(report)
        else:
            raise ValueError("neither a result of `mmserve bench` with answers in it nor one of `scripts.gpu_check`")
    return _refit_from_benches(decoder, benches, num_replicas) if benches else decoder


def _refit_from_steps(decoder: Decoder, report: Mapping[str, Any]) -> Decoder:
    """Compute from the prefill, reading KV from how decode steps grow with the batch, t0 from where they begin.

    What reads weights and what a row takes can't be told from the latter two, and stay as they are.
    """
    shape = decoder.shape
    batches = np.array([step["batch"] for step in report["decode"]], dtype=np.float64)
    read_bytes = np.array([step["gigabytes"] for step in report["decode"]]) * 1e9
    contexts = (read_bytes - (shape.body_params + shape.head_params) * BF16_BYTES) / batches / shape.kv_bytes_per_token
    tokens = float(report["prefill"]["tokens"])
    measured_ms = [*(step["ms"] for step in report["decode"]), report["prefill"]["ms"]]

    def fitted(factors: Array) -> Decoder:
        compute, kv_read, step_s = factors
        was = decoder.reached
        reached = replace(was, compute=was.compute / compute, kv_read=was.kv_read / kv_read, step_s=was.step_s * step_s)
        return replace(decoder, reached=reached)

    def errors(factors: Array) -> Array:
        machine = fitted(factors)
        steps_s = [machine.step_s(rows, context) for rows, context in zip(batches, contexts, strict=True)]
        steps_s.append(machine.step_s(0.0, 0.0, tokens, tokens / 2))
        return np.array([1e3 * step_s / ms - 1 for step_s, ms in zip(steps_s, measured_ms, strict=True)])

    machine = fitted(_least_squares(errors, 3))
    measured = {"pictures_per_s": report.get("images_per_s"), "audio_s_per_s": report.get("audio_seconds_per_s")}
    return replace(machine, card=replace(machine.card, **{name: value for name, value in measured.items() if value}))


def _refit_from_benches(decoder: Decoder, benches: Sequence[Mapping[str, Any]], num_replicas: int) -> Decoder:
    def fitted(factors: Array) -> Decoder:
        return replace(decoder, reached=_slower(decoder.reached, float(factors[0])))

    def errors(factors: Array) -> Array:
        machine = fitted(factors)
        return np.array([1e3 * _mean_step_s(machine, bench, num_replicas) / bench["mean_tpot_ms"] - 1 for bench in benches])

    return fitted(_least_squares(errors, 1))


def _least_squares(errors: Callable[[Array], Array], num_factors: int) -> Array:
    """Positive factors that make the sum of squared errors small, by Gauss and Newton on their logarithms."""
    logs = np.zeros(num_factors)
    for _ in range(NUM_ROUNDS):
        now = errors(np.exp(logs))
        slopes = np.stack([(errors(np.exp(logs + STEP * unit)) - now) / STEP for unit in np.eye(num_factors)], axis=1)
        change, *_ = np.linalg.lstsq(slopes, -now, rcond=None)
        logs = logs + np.clip(change, -1.0, 1.0)
    factors: Array = np.exp(logs)
    return factors


def _mean_step_s(decoder: Decoder, bench: Mapping[str, Any], num_replicas: int) -> float:
    """At the rows and the rate that were measured, if all requests had been alike."""
    answer, prompt = bench["total_output_tokens"] / bench["completed"], bench["total_input_tokens"] / bench["completed"]
    workload = Workload(
        {"text": 1.0}, system_tokens=0, mean_text=prompt, text_spread=0.0, mean_answer=answer, answer_spread=0.0,
        repeat_rate=bench["repeat_rate"],
    )  # fmt: skip
    rows = bench["output_throughput"] / num_replicas * bench["mean_tpot_ms"] / 1e3  # Little's law
    rate = bench["completed"] / bench["duration"] / num_replicas
    return ReplicaModel(decoder, workload, prompts_of(workload)).mean_step_s(rows, rate)


def _slower(reached: Efficiencies, factor: float) -> Efficiencies:
    """Everything takes so many times as long."""
    shares = {name: getattr(reached, name) / factor for name in ("compute", "weight_read", "kv_read", "prefill_attention", "link")}
    times = {name: getattr(reached, name) * factor for name in ("step_s", "row_s", "all_reduce_s")}
    return replace(reached, **shares, **times)
