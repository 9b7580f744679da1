"""What an encoder process runs: batches through towers, rows into the shared buffer.

A batch that doesn't fit in memory is halved until it does; an item that fails, fails alone.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from mmserve.composition import EncoderSpec
from mmserve.models.linear import compute_dtype
from mmserve.models.tower import Tower, TowerItem
from mmserve.models.weights import BadCheckpoint
from mmserve.plan import EncodeItem, EncodePlan, EncodeResult, EncoderReady, EncoderWorkerSpec
from mmserve.shared_buffer import SharedMemory
from mmserve.worker.device import is_out_of_memory, release_memory, tensor_in

log = logging.getLogger(__name__)


TOWERS = {
    "clip": "mmserve.encoders.vision_tower:VisionTower",
    "whisper": "mmserve.encoders.audio_tower:AudioTower",
    "qwen2_audio": "mmserve.encoders.qwen2_audio_tower:Qwen2AudioTower",
    "ultravox": "mmserve.encoders.ultravox_tower:UltravoxTower",
    "qwen2_5_omni_vision": "mmserve.encoders.qwen2_5_omni_towers:OmniVisionTower",
    "qwen2_5_omni_audio": "mmserve.encoders.qwen2_5_omni_towers:OmniAudioTower",
}
"""By format.  Named, not imported: each brings its own part of transformers."""


class EncoderRunner:
    """The towers of one modality over the shared buffer."""

    def __init__(self, towers: Mapping[str, Tower], memory: SharedMemory, device: torch.device, max_batch: int) -> None:
        self._towers = towers  # by decoder
        self._memory = memory
        self._device = device
        self._max_batch = max_batch

    def warm_up(self) -> float:
        """An item for every decoder; seconds it took.  Raises RuntimeError if a row isn't finite."""
        started = time.perf_counter()
        for decoder, tower in self._towers.items():
            (rows,) = tower.encode([tower.blank()], decoder)
            if not bool(rows.isfinite().all()):
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
        inputs = [TowerItem(tensor_in(self._memory, item.features), item.rows.shape[0], item.picture_size) for item in items]
        encoded = self._towers[decoder].encode(inputs, decoder)
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
    device = torch.device(spec.device)
    dtype = compute_dtype(device, getattr(torch, spec.dtype))  # rows are rounded to the decoder's when they are written
    runner = EncoderRunner(load_towers(spec.specs, device, dtype), memory, device, spec.max_batch)
    return EncoderReady(warmup_s=runner.warm_up()), runner.run


def load_towers(specs: Mapping[str, EncoderSpec], device: torch.device, dtype: torch.dtype) -> dict[str, Tower]:
    """By decoder; a spec that serves several is loaded once.  Raises BadCheckpoint."""
    loaded: dict[int, Tower] = {}
    for spec in specs.values():
        if id(spec) not in loaded:
            loaded[id(spec)] = _load_tower(spec, device, dtype)
    return {decoder: loaded[id(spec)] for decoder, spec in specs.items()}


def _load_tower(spec: EncoderSpec, device: torch.device, dtype: torch.dtype) -> Tower:
    if spec.format not in TOWERS:
        raise BadCheckpoint(f"encoders of format {spec.format!r} are not supported; supported are {', '.join(TOWERS)}")
    module, _, name = TOWERS[spec.format].partition(":")
    tower: Tower = getattr(importlib.import_module(module), name)(spec, device, dtype)
    return tower
