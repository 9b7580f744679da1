"""Linear layers whose weights never change, laid out for the processor they are on.

In float32 and on a GPU PyTorch's own layer is as good as any.  In half precision on a CPU it is not: where the processor multiplies such
numbers itself, oneDNN reads a matrix faster that was put into its own order beforehand; where it doesn't, a product in bfloat16 is up to
ten times slower than in float32.  There weights are kept in 16 bits and everything else is float32: FBGEMM widens them on the way.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

_HALVES = (torch.bfloat16, torch.float16)


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Of hidden vectors, keys and values over weights of `dtype`: float32 where this CPU can't multiply halves itself."""
    is_slow = device.type == "cpu" and dtype in _HALVES and not has_arithmetic(dtype)
    return torch.float32 if is_slow and "fbgemm" in torch.backends.quantized.supported_engines else dtype


class Linear(Protocol):
    """x W^T + b, with W [out, in]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, in] -> [R, out], both of `compute_dtype`"""
        ...


class PlainLinear:
    """PyTorch's own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)


class PackedLinear:
    """The weight in oneDNN's order, through the operators that torch.compile uses for frozen models."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")


class HalfWeightLinear:
    """The weight in float16, in FBGEMM's order; rows, sums and bias in float32.

    A bfloat16 weight from 2^-17 to 65504 is itself in float16, a smaller one is off by at most 2^-25.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Raises ValueError for a weight that float16 can't hold."""
        if weight.numel() and weight.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(f"a weight of {weight.abs().max().item():g} is too large for float16; use --dtype float32")
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(rows, self._weight)


class LinearMaker:
    """Makes the layers of one decoder."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, computes_in: torch.dtype) -> None:
        """`dtype` is the weights', `computes_in` that of what they are multiplied with."""
        self.computes_in = computes_in
        self._widens = dtype != computes_in
        is_half = device.type == "cpu" and dtype in _HALVES
        self._packs = is_half and torch.backends.mkldnn.is_available() and has_arithmetic(dtype)

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A weight that is used elsewhere, too, is then held twice: without that a step of one row takes a seventh longer."""
        if self._widens:
            return HalfWeightLinear(weight, bias)
        if self._packs:
            return PackedLinear(weight, bias)
        return PlainLinear(weight, bias)


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies numbers of a half-precision type itself."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
