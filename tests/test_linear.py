"""Every layout of a linear layer computes the same product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmserve.models import linear
from mmserve.models.linear import HalfWeightLinear, Linear, LinearMaker, PackedLinear, PlainLinear, compute_dtype

CPU = torch.device("cpu")
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
needs_fbgemm = pytest.mark.skipif(not HAS_FBGEMM, reason="PyTorch has FBGEMM on x86 only")


class PackedInName(PlainLinear):
    """Not every processor that runs the tests can pack half precision."""


def weights(dtype: torch.dtype, num_out: int = 70, num_in: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_out, num_in, generator=generator).to(dtype), torch.randn(num_out, generator=generator).to(dtype)


def maker(device: torch.device, dtype: torch.dtype) -> LinearMaker:
    return LinearMaker(device, dtype, computes_in=compute_dtype(device, dtype))


def assert_is_linear(layer: Linear, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tolerance: float) -> None:
    """`dtype` is of the rows."""
    for num_rows in (1, 2, 3, 17, 64):
        rows = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        expected = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
        got = layer(rows)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_the_layer_of_this_processor_is_right(dtype: torch.dtype, tolerance: float, has_bias: bool) -> None:
    weight, bias = weights(dtype)
    chosen = bias if has_bias else None
    assert_is_linear(maker(CPU, dtype)(weight, chosen), weight, chosen, compute_dtype(CPU, dtype), tolerance)


def test_packed_weights_give_the_plain_product() -> None:
    weight, bias = weights(torch.float32)
    assert_is_linear(PackedLinear(weight, bias), weight, bias, torch.float32, 1e-5)


@needs_fbgemm
def test_bfloat16_weights_kept_in_16_bits_lose_nothing() -> None:
    weight, bias = weights(torch.bfloat16)
    assert_is_linear(HalfWeightLinear(weight, bias), weight, bias, torch.float32, 1e-5)


@needs_fbgemm
def test_a_weight_beyond_float16_is_refused_and_named() -> None:
    """FBGEMM would clamp it to 65504 without a word."""
    weight, _ = weights(torch.bfloat16)
    weight[3, 5] = -70_000
    with pytest.raises(ValueError, match=r"70144.*--dtype float32"):
        HalfWeightLinear(weight)


@pytest.mark.parametrize("has_arithmetic", [False, True])
def test_half_precision_is_packed_where_the_processor_has_it_and_only_kept_where_not(
    has_arithmetic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "has_arithmetic", lambda dtype: has_arithmetic)
    monkeypatch.setattr(linear, "PackedLinear", PackedInName)
    weight, _ = weights(torch.bfloat16)
    layer = maker(CPU, torch.bfloat16)(weight)
    if has_arithmetic:
        assert [type(layer), compute_dtype(CPU, torch.bfloat16)] == [PackedInName, torch.bfloat16]
    elif HAS_FBGEMM:
        assert [type(layer), compute_dtype(CPU, torch.bfloat16)] == [HalfWeightLinear, torch.float32]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("meta", torch.bfloat16), ("cuda", torch.float16)])
def test_float32_and_gpus_get_the_layer_of_pytorch(device: str, dtype: torch.dtype) -> None:
    weight, _ = weights(dtype)
    assert type(maker(torch.device(device), dtype)(weight)) is PlainLinear
