"""Batches of an encoder worker: one bad item hurts nobody, and what doesn't fit is halved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mmserve.media import MediaKind
from mmserve.models import linear
from mmserve.models.tower import TowerItem
from mmserve.plan import EncodeItem, EncodePlan, EncoderWorkerSpec
from mmserve.shared_buffer import BufferSlice, SharedBuffer, SharedMemory
from mmserve.worker import encoder_worker
from mmserve.worker.encoder_worker import EncoderRunner, start_encoder

HIDDEN = 4
CPU = torch.device("cpu")
needs_fbgemm = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="PyTorch has FBGEMM on x86 only")


class FakeTower:
    """Two rows an item, each the item's number (its first sample).  Runs out of memory above `capacity` items."""

    def __init__(self, capacity: int = 100) -> None:
        self.capacity = capacity
        self.batches: list[int] = []
        self.never_fits: float | None = None

    def blank(self) -> TowerItem:
        return TowerItem(torch.zeros(1), 2)

    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        self.batches.append(len(items))
        if len(items) > self.capacity or self.never_fits in [float(item.features[0]) for item in items]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [item.features[0].expand(2, HIDDEN) + (100 if decoder == "large" else 0) for item in items]


def runner(tower: FakeTower, memory: SharedMemory, device: torch.device, max_batch: int) -> EncoderRunner:
    return EncoderRunner({"small": tower, "large": tower}, memory, device, max_batch)


@pytest.fixture
def buffer() -> SharedBuffer:
    return SharedBuffer(2**20)


def items(buffer: SharedBuffer, numbers: Sequence[float], dtype: str = "float32") -> tuple[EncodeItem, ...]:
    made = []
    for number in numbers:
        features, rows = buffer.allocate((3,), "float32"), buffer.allocate((2, HIDDEN), dtype)
        buffer.array(features)[:] = number
        buffer.array(rows)[:] = 7
        made.append(EncodeItem(features, rows))
    return tuple(made)


def first_numbers(buffer: SharedBuffer, made: Sequence[EncodeItem]) -> list[float]:
    return [float(buffer.array(item.rows)[1, HIDDEN - 1]) for item in made]


def test_rows_land_in_the_place_of_their_item(buffer: SharedBuffer) -> None:
    made = items(buffer, [5, 3, 8])
    result = runner(FakeTower(), buffer.memory, CPU, 48).run(EncodePlan(12, "large", made))
    assert (result.plan_id, result.errors) == (12, (None, None, None))
    assert first_numbers(buffer, made) == [105, 103, 108]


def test_a_plan_longer_than_the_largest_batch_is_cut(buffer: SharedBuffer) -> None:
    tower, made = FakeTower(), items(buffer, range(7))
    assert runner(tower, buffer.memory, CPU, 3).run(EncodePlan(1, "small", made)).errors == (None,) * 7
    assert tower.batches == [3, 3, 1]
    assert first_numbers(buffer, made) == [0, 1, 2, 3, 4, 5, 6]


def test_a_batch_that_does_not_fit_is_halved_until_it_does(buffer: SharedBuffer) -> None:
    tower, made = FakeTower(capacity=3), items(buffer, range(12))
    assert runner(tower, buffer.memory, CPU, 48).run(EncodePlan(1, "small", made)).errors == (None,) * 12
    assert tower.batches == [12, 6, 3, 3, 6, 3, 3]
    assert first_numbers(buffer, made) == list(range(12))


def test_only_the_item_that_never_fits_is_out_of_memory(buffer: SharedBuffer) -> None:
    tower, made = FakeTower(), items(buffer, [1, 2, 3, 4, 5])
    tower.never_fits = 4.0
    result = runner(tower, buffer.memory, CPU, 48).run(EncodePlan(1, "small", made))
    assert result.errors == (None, None, None, "out_of_memory", None)
    assert first_numbers(buffer, made) == [1, 2, 3, 7, 5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_an_error_of_their_item_and_are_not_written(buffer: SharedBuffer, bad: float) -> None:
    made = items(buffer, [1, bad, 3])
    assert runner(FakeTower(), buffer.memory, CPU, 48).run(EncodePlan(1, "small", made)).errors == (None, "encoder_nan", None)
    assert first_numbers(buffer, made) == [1, 7, 3]


def test_rows_are_written_in_the_dtype_of_their_place(buffer: SharedBuffer) -> None:
    made = items(buffer, [1.5], dtype="bfloat16")
    runner(FakeTower(), buffer.memory, CPU, 48).run(EncodePlan(1, "small", made))
    assert buffer.array(made[0].rows).tolist() == [[0x3FC0] * HIDDEN] * 2  # 1.5 in bfloat16


def test_what_overflows_the_rows_dtype_is_not_finite(buffer: SharedBuffer) -> None:
    made = items(buffer, [1e9], dtype="float16")
    assert runner(FakeTower(), buffer.memory, CPU, 48).run(EncodePlan(1, "small", made)).errors == ("encoder_nan",)


def test_a_place_of_another_width_is_refused_loudly(buffer: SharedBuffer) -> None:
    made = items(buffer, [1])
    wrong = EncodeItem(made[0].features, BufferSlice(made[0].rows.offset, (2, HIDDEN // 2), "float32"))
    with pytest.raises(ValueError, match="rows of shape"):
        runner(FakeTower(), buffer.memory, CPU, 48).run(EncodePlan(1, "small", (wrong,)))


def test_the_warm_up_runs_every_projector_and_refuses_what_is_not_finite(buffer: SharedBuffer) -> None:
    tower = FakeTower()
    assert runner(tower, buffer.memory, CPU, 48).warm_up() >= 0
    assert tower.batches == [1, 1]
    tower.blank = lambda: TowerItem(torch.full((1,), np.nan), 2)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="warm-up"):
        runner(tower, buffer.memory, CPU, 48).warm_up()


@needs_fbgemm
@pytest.mark.parametrize(("has_arithmetic", "computed_in"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_tower_computes_in_half_precision_only_where_the_cpu_does(
    buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch, has_arithmetic: bool, computed_in: torch.dtype
) -> None:
    """With `--dtype bfloat16` a picture once took eight times as long on a CPU that only has AVX2."""
    dtypes: list[torch.dtype] = []

    def load(spec: object, device: torch.device, dtype: torch.dtype) -> FakeTower:
        dtypes.append(dtype)
        return FakeTower()

    monkeypatch.setattr(linear, "has_arithmetic", lambda dtype: has_arithmetic)
    monkeypatch.setattr(encoder_worker, "_load_tower", load)
    start_encoder(EncoderWorkerSpec(MediaKind.IMAGE, {"small": object()}, "cpu", "bfloat16", 1, 8), buffer.memory)
    assert dtypes == [computed_in]
