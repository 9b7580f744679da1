"""What simulated worker processes run: the loop of real workers, answered by arithmetic and a sleep.

An answer depends on the row's seed, the position and the last token, so that a replayed row says the same, and it never ends by itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from mmserve.plan import (
    DecoderReady,
    DecoderWorkerSpec,
    EncodePlan,
    EncodeResult,
    EncoderReady,
    EncoderWorkerSpec,
    Rank,
    SampledToken,
    StepFailed,
    StepPlan,
    StepResult,
)
from mmserve.roofline.hardware import SHAPES
from mmserve.roofline.timing import encode_s, kv_tokens, step_s
from mmserve.shared_buffer import SharedMemory
from mmserve.sim.timing import amount_of, card_of, work_of
from mmserve.worker.in_order import InOrder
from mmserve.worker.main import live, prepare_process

_MULTIPLIERS = (6364136223846793005, 1442695040888963407, 11400714819323198485)  # odd, from well-known 64-bit mixers


def run_decoder(end: socket.socket, spec: DecoderWorkerSpec, memory: SharedMemory, rank: Rank | None = None) -> None:
    """Report DecoderReady, then answer each StepPlan when its time is over, until Shutdown or until main is gone.

    Ranks of a group each answer alone, after the time that the group takes.
    """
    prepare_process(f"decoder-{spec.name}" + (f"-rank-{rank.rank}" if rank else ""), spec.num_threads)
    live(end, lambda: start_decoder(spec, 1 if rank is None else rank.size))


def run_encoder(end: socket.socket, spec: EncoderWorkerSpec, memory: SharedMemory) -> None:
    """Report EncoderReady, then answer each EncodePlan when its time is over, until Shutdown or until main is gone."""
    prepare_process(f"encoder-{spec.kind.value}", spec.num_threads)
    live(end, lambda: (EncoderReady(warmup_s=0.0), SimulatedEncoder(spec, memory).run))


class SimulatedDecoder:
    """One decoder of `num_ranks` cards."""

    def __init__(self, spec: DecoderWorkerSpec, num_ranks: int) -> None:
        if spec.simulated is None:
            raise ValueError(f"device {spec.device} needs to be told what it holds")
        self._shape = SHAPES[spec.simulated.shape]
        self._token_ids = spec.simulated.token_ids
        self._card = card_of(spec.device)
        self._num_ranks = num_ranks
        self.num_blocks = kv_tokens(self._shape, self._card, spec.gpu_memory_utilization, num_ranks) // spec.block_size

    def run(self, plan: StepPlan) -> StepResult:
        began_s = time.monotonic()
        seconds = step_s(work_of(plan), self._shape, self._card, self._num_ranks)
        tokens = draw(plan, self._token_ids)
        _sleep_until(began_s + seconds)
        return StepResult(plan.step_id, tokens, seconds=seconds)


class SimulatedEncoder:
    """Writes zeros: finite, the right number of rows, and as cheap as rows can be."""

    def __init__(self, spec: EncoderWorkerSpec, memory: SharedMemory) -> None:
        self._kind = spec.kind
        self._card = card_of(spec.device)
        self._memory = memory

    def run(self, plan: EncodePlan) -> EncodeResult:
        began_s = time.monotonic()
        seconds = encode_s(self._kind, amount_of(self._kind, plan.items), self._card)
        for item in plan.items:
            self._memory.array(item.rows).fill(0)
        _sleep_until(began_s + seconds)
        return EncodeResult(plan.plan_id, (None,) * len(plan.items), seconds)


def start_decoder(spec: DecoderWorkerSpec, num_ranks: int) -> tuple[DecoderReady, Callable[[StepPlan], StepResult | StepFailed]]:
    """The ready report and the function that runs a step.  Raises ValueError if the card can't hold the decoder."""
    decoder = SimulatedDecoder(spec, num_ranks)
    config = spec.config or {}
    ready = DecoderReady(decoder.num_blocks, spec.block_size, spec.max_model_len, int(config["vocab_size"]), int(config["hidden_size"]))
    return ready, InOrder(decoder.run)


def draw(plan: StepPlan, token_ids: Sequence[int]) -> tuple[SampledToken | None, ...]:
    """[S] tokens out of `token_ids`, None where a row doesn't reach its last token."""
    last_ids = plan.token_ids[plan.query_starts[1:] - 1].tolist()
    positions = plan.context_lens.tolist()  # of the token to draw
    return tuple(
        None if how is None else SampledToken(token_ids[_mix(how.seed, position, last_id) % len(token_ids)])
        for how, position, last_id in zip(plan.sampling, positions, last_ids, strict=True)
    )


def _mix(*parts: int) -> int:
    """A well-spread number below 2**32, the same in every process."""
    mixed = sum(part * multiplier for part, multiplier in zip(parts, _MULTIPLIERS, strict=True)) % 2**64
    return (mixed ^ mixed >> 29) * _MULTIPLIERS[2] % 2**64 >> 32


def _sleep_until(due_s: float) -> None:
    left_s = due_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
