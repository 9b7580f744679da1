"""How long steps and towers take, beside what the machine can do at all: its memory's bandwidth and its rate of matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mmserve.composition import Composition, DecoderSpec
from mmserve.config import kv_block_size
from mmserve.encoders.audio_tower import AudioTower
from mmserve.encoders.vision_tower import VisionTower
from mmserve.models.tower import Tower
from mmserve.plan import DecoderWorkerSpec, StepPlan, StepResult
from mmserve.shared_buffer import SharedBuffer
from mmserve.worker import trial_steps
from mmserve.worker.model_runner import ModelRunner


@dataclass(frozen=True)
class Load:
    """How much of everything: a GPU's worth, or just enough to run each line."""

    copied_bytes: int
    matrix_side: int
    batches: Sequence[int]  # rows of a decode step
    context_len: int
    prefill_tokens: int
    images: int  # in a batch
    windows: int
    repeats: int


def bandwidth(device: torch.device, load: Load) -> float:
    """Bytes a second, read plus written by one large copy."""
    source = torch.empty(load.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * load.copied_bytes / seconds(lambda: target.copy_(source), device, load.repeats)


def matrix_rate(device: torch.device, load: Load) -> float:
    """Floating-point operations a second of a bfloat16 product of two square matrices."""
    left, right = (torch.randn(load.matrix_side, load.matrix_side, device=device).bfloat16() for _ in range(2))
    return 2 * load.matrix_side**3 / seconds(lambda: left @ right, device, load.repeats)


def make_runner(decoder: DecoderSpec, device: str, load: Load) -> ModelRunner:
    """As the server would make it, with a pool on the CPU for every row of the largest batch."""
    fields = decoder.config
    token_bytes = 4 * int(fields["num_hidden_layers"]) * int(fields["num_key_value_heads"]) * int(fields["head_dim"])
    spec = DecoderWorkerSpec(
        name=decoder.name,
        directory=decoder.weights.path,
        device=device,
        dtype="bfloat16",
        num_threads=torch.get_num_threads(),
        block_size=kv_block_size(0, device, "bfloat16"),
        max_model_len=load.context_len + 1024,
        max_num_seqs=max(load.batches),
        max_num_batched_tokens=load.prefill_tokens,
        kv_cache_memory_bytes=token_bytes * (load.context_len + 256) * max(load.batches),
        gpu_memory_utilization=0.8,
        config=decoder.config,
        names=decoder.weights.names,
    )
    runner = ModelRunner(spec, SharedBuffer(2**20).memory)
    runner.warm_up()
    return runner


def decode_steps(runner: ModelRunner, decoder: DecoderSpec, device: torch.device, load: Load, peak: float) -> list[dict[str, float]]:
    """Whole steps as a worker runs them, sampling included; bytes are all weights but the embedding, and every row's keys and values."""
    ready = runner.ready
    width = -(-load.context_len // ready.block_size)
    results = []
    for batch in load.batches:
        tables = np.arange(batch * width).reshape(batch, width) % ready.num_blocks
        plan = trial_steps.decode([load.context_len] * batch, tables, ready.block_size)
        step_s = seconds(lambda plan=plan: _run(runner, plan), device, load.repeats)
        read = 2 * (num_parameters(decoder) + batch * load.context_len * _kv_elements(decoder))
        results.append({"batch": batch, "ms": step_s * 1e3, "gigabytes": read / 1e9, "of_bandwidth": read / step_s / peak})
    return results


def prefill_step(runner: ModelRunner, decoder: DecoderSpec, device: torch.device, load: Load, peak: float) -> dict[str, float]:
    """One prompt as long as a step; operations are those of the linear layers and of causal attention."""
    fields, tokens = decoder.config, load.prefill_tokens
    step_s = seconds(lambda: _run(runner, trial_steps.prefill([tokens], runner.ready.block_size)), device, load.repeats)
    head = int(fields["vocab_size"]) * int(fields["hidden_size"])
    attention = 2 * tokens**2 * int(fields["num_hidden_layers"]) * int(fields["num_attention_heads"]) * int(fields["head_dim"])
    operations = 2 * (num_parameters(decoder) - head) * tokens + attention
    return {"tokens": tokens, "ms": step_s * 1e3, "tokens_per_s": tokens / step_s, "of_matrix_rate": operations / step_s / peak}


def towers(composition: Composition, device: torch.device, load: Load) -> dict[str, float]:
    """Images a second, and seconds of sound a second in whole windows, features and projector included."""
    vision, audio = composition.vision["small"], composition.audio["small"]
    image_s = _encode_s(VisionTower(vision, device, torch.bfloat16), load.images, device, load)
    window_s = _encode_s(AudioTower(audio, device, torch.bfloat16), load.windows, device, load)
    return {"images_per_s": load.images / image_s, "audio_seconds_per_s": load.windows * audio.window_s / window_s}


def num_parameters(decoder: DecoderSpec) -> int:
    """That a token is multiplied by: all but the embedding."""
    return sum(header.num_elements for name, header in decoder.weights.headers().items() if name != "model.embed_tokens.weight")


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of `repeats` runs, after one that isn't counted."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _encode_s(tower: Tower, batch: int, device: torch.device, load: Load) -> float:
    items = [tower.blank()] * batch
    return seconds(lambda: tower.encode(items, "small"), device, load.repeats)


def _run(runner: ModelRunner, plan: StepPlan) -> None:
    result = runner.run(plan)
    if not isinstance(result, StepResult) or result.failed_rows:
        raise RuntimeError(f"a step failed: {result}")


def _kv_elements(decoder: DecoderSpec) -> int:
    """Of a token, in all layers."""
    fields = decoder.config
    return 2 * int(fields["num_hidden_layers"]) * int(fields["num_key_value_heads"]) * int(fields["head_dim"])
