"""Decode steps recorded once and replayed: on a GPU, launching a layer's kernels one by one takes longer than running them.

A recorded step has fixed shapes, so there is one for each bucket of rows and of table widths, and a real step is padded to the smallest
that holds it.  Rows of padding have length 0: they see no keys, write to a slot that nobody owns, and nobody reads what they give.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from mmserve.models.decoder import Decoder
from mmserve.models.flash_attention import Decodes, FlashAttention, FlashPlan
from mmserve.plan import StepPlan

log = logging.getLogger(__name__)


class Recorder(Protocol):
    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """What does the same again, reading and writing the same memory."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        # Once eagerly: a kernel's first launch may load a module or allocate a workspace, which can't be recorded.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        return graph.replay


class DecodeGraphs:
    """Recorded decode steps of one decoder.  Inputs and output live in memory of their own, as large as the largest bucket."""

    def __init__(self, decoder: Decoder, attention: FlashAttention, *, max_rows: int, max_blocks: int, num_axes: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self._num_axes = num_axes
        self._row_buckets = row_buckets(max_rows)
        self._width_buckets = width_buckets(max_blocks)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        device = decoder.device
        # Token ids, slots, and a line for each position axis
        self._inputs = _Mirrored((2 + num_axes, max_rows), torch.int64, device)
        self._lengths = _Mirrored((max_rows,), torch.int32, device)
        self._tables = _Mirrored((max_rows, max_blocks), torch.int32, device)
        self._output = torch.zeros(max_rows, decoder.config.hidden_size, device=device, dtype=decoder.dtype)

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> None:
        """Largest first, so that the smaller ones fit into the memory it left.  All ranks of a group record in this order."""
        started = time.perf_counter()
        for rows in reversed(self._row_buckets):
            for width in reversed(self._width_buckets):
                self._fill_padding(rows)
                self._send()
                self._replays[rows, width] = recorder.record(self._step(rows, width))
        log.info("recorded decode steps=%d seconds=%.1f", len(self._replays), time.perf_counter() - started)

    def can_run(self, step: StepPlan) -> bool:
        """Every row is one token of text, and there is a bucket for them."""
        num_rows, width = step.block_tables.shape
        return len(step.token_ids) == num_rows and not step.media and num_rows <= self._row_buckets[-1] and width <= self._width_buckets[-1]

    @torch.inference_mode()
    def run(self, step: StepPlan) -> torch.Tensor:
        """[S, H], a view that the next run overwrites."""
        num_rows, width = step.block_tables.shape
        bucket = (_smallest(self._row_buckets, num_rows), _smallest(self._width_buckets, width))
        self._fill_padding(bucket[0])
        inputs = self._inputs.host
        inputs[0, :num_rows] = step.token_ids
        inputs[1, :num_rows] = step.slot_mapping
        inputs[2:, :num_rows] = step.positions
        self._lengths.host[:num_rows] = step.context_lens
        self._tables.host[:num_rows, :width] = step.block_tables
        self._send()
        self._replays[bucket]()
        return self._output[:num_rows]

    def _send(self) -> None:
        for mirrored in (self._inputs, self._lengths, self._tables):
            mirrored.send()

    def _fill_padding(self, num_rows: int) -> None:
        self._inputs.host[:, :num_rows] = 0
        self._inputs.host[1, :num_rows] = self._attention.scratch_slot
        self._lengths.host[:num_rows] = 0

    def _step(self, rows: int, width: int) -> Callable[[], None]:
        inputs, output = self._inputs.device[:, :rows], self._output[:rows]
        positions = inputs[2] if self._num_axes == 1 else inputs[2:]
        decodes = Decodes(None, self._tables.device[:rows, :width], self._lengths.device[:rows])
        plan = FlashPlan(inputs[1], (decodes,))

        def step() -> None:
            output.copy_(self._decoder.forward(self._decoder.embed(inputs[0]), positions, self._attention, plan))

        return step


class _Mirrored:
    """An array on the host, and the tensor on the device that it is sent to."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._pinned = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = self._pinned.numpy()
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def send(self) -> None:
        # Asynchronous: whoever fills `host` next has waited for the tokens of this step.
        self.device.copy_(self._pinned, non_blocking=True)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, ... 32, then every 32: a step is padded to at most twice its rows, a large one by 31."""
    small = [2**i for i in range(6) if 2**i < max_rows]
    return (*small, *range(64, max_rows, 32), max_rows)


def width_buckets(max_blocks: int) -> tuple[int, ...]:
    """4, 16, 64, ... blocks: the width decides only into how many parts a row's keys are split."""
    widths = []
    width = 4
    while width < max_blocks:
        widths.append(width)
        width *= 4
    return (*widths, max_blocks)


def _smallest(buckets: tuple[int, ...], wanted: int) -> int:
    return buckets[bisect.bisect_left(buckets, wanted)]
