"""What an encoder process runs: batches through a tower, rows into the shared buffer.

A batch that doesn't fit in memory is halved until it does; an item that fails, fails alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mmserve.composition import VisionSpec
from mmserve.plan import EncodeItem, EncodePlan, EncodeResult, EncoderReady, EncoderWorkerSpec
from mmserve.shared_buffer import SharedMemory
from mmserve.worker.device import is_out_of_memory, release_memory, tensor_in

log = logging.getLogger(__name__)


class Tower(Protocol):
    @property
    def decoders(self) -> tuple[str, ...]: ...

    def blank(self) -> torch.Tensor: ...

    def num_rows(self, features: torch.Tensor) -> int: ...

    def encode(self, items: Sequence[torch.Tensor], num_rows: Sequence[int], decoder: str) -> list[torch.Tensor]: ...


class EncoderRunner:
    """One tower over the shared buffer."""

    def __init__(self, tower: Tower, memory: SharedMemory, device: torch.device, max_batch: int) -> None:
        self._tower = tower
        self._memory = memory
        self._device = device
        self._max_batch = max_batch

    def warm_up(self) -> float:
        """A full batch for every decoder; seconds it took.  Raises RuntimeError if a row isn't finite."""
        started = time.perf_counter()
        blank = self._tower.blank()
        num_rows = self._tower.num_rows(blank)
        for decoder in self._tower.decoders:
            rows = self._tower.encode([blank], [num_rows], decoder)
            if not bool(rows[0].isfinite().all()):
                raise RuntimeError(f"the warm-up batch for {decoder} is not finite")
        return time.perf_counter() - started

    def run(self, plan: EncodePlan) -> EncodeResult:
        """Write the rows of every item that comes out finite.  Out of memory is a result; any other fault is the end of this worker."""
        started = time.perf_counter()
        errors: list[str | None] = []
        for start in range(0, len(plan.items), self._max_batch):
            errors += self._encode(plan, plan.items[start : start + self._max_batch])
        return EncodeResult(plan.plan_id, tuple(errors), time.perf_counter() - started)

    def _encode(self, plan: EncodePlan, items: Sequence[EncodeItem]) -> list[str | None]:
        try:
            return self._encode_once(items, plan.decoder)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release_memory(self._device)
        log.warning("plan=%d items=%d out of memory", plan.plan_id, len(items))
        if len(items) == 1:
            return ["out_of_memory"]
        half = len(items) // 2
        return self._encode(plan, items[:half]) + self._encode(plan, items[half:])

    def _encode_once(self, items: Sequence[EncodeItem], decoder: str) -> list[str | None]:
        features = [tensor_in(self._memory, item.features) for item in items]
        encoded = self._tower.encode(features, [item.rows.shape[0] for item in items], decoder)
        return [self._write(item, rows) for item, rows in zip(items, encoded, strict=True)]

    def _write(self, item: EncodeItem, rows: torch.Tensor) -> str | None:
        target = tensor_in(self._memory, item.rows)
        if target.shape != rows.shape:
            raise ValueError(f"rows of shape {tuple(rows.shape)} for a place of {tuple(target.shape)}")
        rows = rows.to(target.dtype)
        if not bool(rows.isfinite().all()):
            return "encoder_nan"
        target.copy_(rows)
        return None


def start_encoder(spec: EncoderWorkerSpec, memory: SharedMemory) -> tuple[EncoderReady, Callable[[EncodePlan], EncodeResult]]:
    """Load and warm up; return the ready report and the function that runs a batch."""
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    runner = EncoderRunner(_load_tower(spec, device, dtype), memory, device, spec.max_batch)
    return EncoderReady(warmup_s=runner.warm_up()), runner.run


def _load_tower(spec: EncoderWorkerSpec, device: torch.device, dtype: torch.dtype) -> Tower:
    # One of the two only: each brings its own half of transformers.
    if isinstance(spec.spec, VisionSpec):
        from mmserve.encoders.vision_tower import VisionTower

        return VisionTower(spec.spec, device, dtype)
    from mmserve.encoders.audio_tower import AudioTower

    return AudioTower(spec.spec, device, dtype)
