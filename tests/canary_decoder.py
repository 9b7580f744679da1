"""The real decoder worker; a canary's has the fault that the file in the environment names, read at every step."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from mmserve.plan import DecoderWorkerSpec, Rank, StepPlan
from mmserve.shared_buffer import SharedMemory
from mmserve.worker import main

FAULT = "CANARY_DECODER_FAULT"  # a path
NONE, DIE_AT_START, CRASH, NAN, CRASH_LATER = "none", "die at start", "crash", "nan", "crash later"
LATER = 6  # steps that drew a token, since the fault was there


def run_decoder(end: socket.socket, spec: DecoderWorkerSpec, memory: SharedMemory, rank: Rank | None = None) -> None:
    if spec.name.endswith("-canary"):
        if _fault() == DIE_AT_START:
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
    num_draws = 0

    def faulty_run(self: ModelRunner, plan: StepPlan) -> Any:
        nonlocal num_draws
        fault = _fault()
        num_draws = 0 if fault == NONE else num_draws + any(each is not None for each in plan.sampling)
        if fault == CRASH or (fault == CRASH_LATER and num_draws > LATER):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, plan)

    def faulty_hidden(self: ModelRunner, plan: StepPlan) -> torch.Tensor:
        hidden = hidden_of(self, plan)
        if _fault() == NAN and num_draws > LATER:
            hidden[:] = torch.nan
        return hidden

    ModelRunner._run = faulty_run  # type: ignore[method-assign]
    ModelRunner._hidden = faulty_hidden  # type: ignore[method-assign]


def _fault() -> str:
    return Path(os.environ[FAULT]).read_text()
