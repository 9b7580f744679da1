"""What a decoder process runs."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.plan import DecoderReady, DecoderWorkerSpec, StepFailed, StepPlan, StepResult
from mmserve.shared_buffer import SharedMemory
from mmserve.worker.model_runner import ModelRunner


def start_decoder(spec: DecoderWorkerSpec, memory: SharedMemory) -> tuple[DecoderReady, Callable[[StepPlan], StepResult | StepFailed]]:
    """Load and warm up; return the ready report and the function that runs a step."""
    runner = ModelRunner(spec, memory)
    runner.warm_up()
    return runner.ready, runner.run
