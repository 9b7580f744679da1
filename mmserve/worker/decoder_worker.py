"""What a decoder process runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mmserve.models.parallel import WHOLE, join_group
from mmserve.plan import DecoderReady, DecoderWorkerSpec, Rank, StepFailed, StepPlan, StepResult
from mmserve.shared_buffer import SharedMemory
from mmserve.worker.in_order import InOrder
from mmserve.worker.model_runner import ModelRunner


def start_decoder(
    spec: DecoderWorkerSpec, memory: SharedMemory, rank: Rank | None
) -> tuple[DecoderReady, Callable[[StepPlan], StepResult | StepFailed]]:
    """Load and warm up; return the ready report and the function that runs a step."""
    shard = WHOLE if rank is None else join_group(rank, torch.device(spec.device))
    runner = ModelRunner(spec, memory, shard)
    runner.warm_up()
    return runner.ready, InOrder(runner.run)
