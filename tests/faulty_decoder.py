"""The real decoder worker with faults on demand.  A request asks for one by the bias of a token that changes nothing else (`MARK`).

Faults that happen once need a flag, a file whose path is in the environment: the first worker to meet the fault takes it away.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from mmserve.plan import DecoderWorkerSpec, Rank, StepPlan
from mmserve.shared_buffer import SharedMemory
from mmserve.worker import main

MARK = 7  # a token id
CRASH, NAN, ILLEGAL_ONCE, NO_MEMORY_FOR_MANY, NO_MEMORY, SLOW, CRASH_ONCE_AT = (round(0.01 * n, 2) for n in range(1, 8))
FLAG = "FAULTY_DECODER_FLAG"  # a path
STARTS = "FAULTY_DECODER_STARTS"  # a path: each worker adds a line
DIE_AT_START = "die at start"
MANY_TOKENS = 24
SLOW_S = 6.0  # longer than a step of a known size may take


def run_decoder(end: socket.socket, spec: DecoderWorkerSpec, memory: SharedMemory, rank: Rank | None = None) -> None:
    with open(os.environ[STARTS], "a") as starts:
        starts.write(f"{os.getpid()}\n")
    if _flag() == DIE_AT_START:
        sys.exit(3)
    live = main.live

    def live_with_faults(end: socket.socket, start: Any) -> None:
        _plant_faults()
        live(end, start)

    main.live = live_with_faults
    main.run_decoder(end, spec, memory, rank)


def _plant_faults() -> None:
    import torch

    from mmserve.worker.model_runner import ModelRunner

    run, hidden_of = ModelRunner._run, ModelRunner._hidden

    def faulty_run(self: ModelRunner, plan: StepPlan) -> Any:
        for fault, position in _faults(plan).values():
            if fault == CRASH or (fault == CRASH_ONCE_AT and _takes_flag(f"{position}")):
                os.kill(os.getpid(), signal.SIGSEGV)
            if fault == ILLEGAL_ONCE and _takes_flag("illegal"):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if fault == NO_MEMORY or (fault == NO_MEMORY_FOR_MANY and len(plan.token_ids) > MANY_TOKENS):
                raise torch.OutOfMemoryError("CUDA out of memory")
            if fault == SLOW and len(plan.token_ids) > MANY_TOKENS:
                time.sleep(SLOW_S)
        return run(self, plan)

    def faulty_hidden(self: ModelRunner, plan: StepPlan) -> torch.Tensor:
        hidden = hidden_of(self, plan)
        for row, (fault, _) in _faults(plan).items():
            if fault == NAN:
                hidden[int(plan.query_starts[row + 1]) - 1, 0] = torch.nan
        return hidden

    ModelRunner._run = faulty_run  # type: ignore[method-assign]
    ModelRunner._hidden = faulty_hidden  # type: ignore[method-assign]


def _faults(plan: StepPlan) -> dict[int, tuple[float, int]]:
    """Row -> what was asked for, and the position of the token that it draws."""
    marked = ((row, each) for row, each in enumerate(plan.sampling) if each is not None and each.logit_bias is not None)
    return {row: (each.logit_bias[MARK], each.position) for row, each in marked if MARK in each.logit_bias}


def _flag() -> str:
    flag = Path(os.environ[FLAG])
    return flag.read_text() if flag.exists() else ""


def _takes_flag(what: str) -> bool:
    if _flag() != what:
        return False
    Path(os.environ[FLAG]).unlink()
    return True
