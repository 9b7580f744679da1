"""Every layout of a linear layer computes the same product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmserve.models import linear
from mmserve.models.linear import Linear, LinearMaker, PackedLinear, PlainLinear, WidenedLinear

CPU = torch.device("cpu")


class PackedInName(PlainLinear):
    """Not every processor that runs the tests can pack half precision."""


def weights(dtype: torch.dtype, num_out: int = 70, num_in: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_out, num_in, generator=generator).to(dtype), torch.randn(num_out, generator=generator).to(dtype)


def assert_is_linear(layer: Linear, weight: torch.Tensor, bias: torch.Tensor | None, tolerance: float) -> None:
    for num_rows in (1, 2, 3, 17, 64):
        rows = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(num_rows)).to(weight.dtype)
        expected = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
        got, wide = layer(rows), layer.in_float32(rows)
        assert (got.dtype, wide.dtype) == (weight.dtype, torch.float32)
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=10 * tolerance)
        torch.testing.assert_close(wide.double(), expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_the_layer_of_this_processor_is_right(dtype: torch.dtype, tolerance: float, has_bias: bool) -> None:
    weight, bias = weights(dtype)
    assert_is_linear(LinearMaker(CPU, dtype)(weight, bias if has_bias else None), weight, bias if has_bias else None, tolerance)


def test_packed_weights_give_the_plain_product() -> None:
    weight, bias = weights(torch.float32)
    assert_is_linear(PackedLinear(weight, bias), weight, bias, 1e-5)


@pytest.mark.parametrize("tile_rows", [1, 7, 70, 500])
def test_tiles_of_any_height_cover_the_whole_weight(tile_rows: int) -> None:
    weight, bias = weights(torch.bfloat16)
    assert_is_linear(WidenedLinear(weight, bias, torch.empty(tile_rows * weight.shape[1])), weight, bias, 1e-2)


def test_widened_results_are_not_rounded_where_float32_was_asked_for() -> None:
    weight, _ = weights(torch.bfloat16)
    rows = torch.randn(8, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    wide = WidenedLinear(weight, None, torch.empty(7 * 96)).in_float32(rows)
    torch.testing.assert_close(wide, F.linear(rows.float(), weight.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_arithmetic", [False, True])
def test_half_precision_is_packed_where_the_processor_has_it_and_widened_where_not(
    has_arithmetic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_has_arithmetic", lambda dtype: has_arithmetic)
    monkeypatch.setattr(linear, "PackedLinear", PackedInName)
    weight, _ = weights(torch.bfloat16)
    layer, shared = LinearMaker(CPU, torch.bfloat16)(weight), LinearMaker(CPU, torch.bfloat16)(weight, is_shared=True)
    # What packs a weight that is used elsewhere too would hold it twice.
    assert [type(layer), type(shared)] == ([PackedInName, PlainLinear] if has_arithmetic else [WidenedLinear, WidenedLinear])


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("meta", torch.bfloat16), ("cuda", torch.float16)])
def test_float32_and_gpus_get_the_layer_of_pytorch(device: str, dtype: torch.dtype) -> None:
    weight, _ = weights(dtype)
    assert type(LinearMaker(torch.device(device), dtype)(weight)) is PlainLinear
