"""Linear layers whose weights never change, laid out for the processor they are on.

In float32 and on a GPU PyTorch's own layer is as good as any.  In half precision on a CPU it is not: where the processor multiplies such
numbers itself, oneDNN reads a matrix faster that was put into its own order beforehand; where it doesn't, a product of more than a few
rows is several times slower than the same one in float32.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

_TILE_BYTES = 2 * 2**20  # of float32 weights made at once: they are used before they leave the cache
_MAX_HALF_ROWS = 2  # up to here reading the weights is the cost, and half precision halves it


class Linear(Protocol):
    """x W^T + b, with W [out, in]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, in] -> [R, out] in the same dtype"""
        ...

    def in_float32(self, rows: torch.Tensor) -> torch.Tensor:
        """The same in float32, not rounded in between where that is free."""
        ...


class PlainLinear:
    """PyTorch's own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)

    def in_float32(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).float()


class PackedLinear:
    """The weight in oneDNN's order, through the operators that torch.compile uses for frozen models."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")

    def in_float32(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).float()


class WidenedLinear:
    """A half-precision weight that is multiplied in float32, a tile at a time, where there are enough rows to pay for widening it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, tile: torch.Tensor) -> None:
        """`tile` is float32 scratch of at least one row of the weight, and layers that run one after the other may share it."""
        self._weight = weight
        self._bias = bias
        self._wide_bias = None if bias is None else bias.float()
        self._tiles = [(part, tile[: part.numel()].view_as(part)) for part in weight.split(len(tile) // weight.shape[1])]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) <= _MAX_HALF_ROWS:
            return F.linear(rows, self._weight, self._bias)
        return self.in_float32(rows).to(rows.dtype)

    def in_float32(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) <= _MAX_HALF_ROWS:
            return F.linear(rows, self._weight, self._bias).float()
        wide = rows.float()
        output = wide.new_empty(len(rows), len(self._weight))
        start = 0
        for part, tile in self._tiles:
            tile.copy_(part)
            torch.mm(wide, tile.t(), out=output[:, start : start + len(part)])
            start += len(part)
        return output if self._wide_bias is None else output.add_(self._wide_bias)


class LinearMaker:
    """Makes the layers of one decoder.  On a CPU they may share scratch memory: one thread at a time may run them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        is_half = device.type == "cpu" and torch.backends.mkldnn.is_available() and dtype in (torch.bfloat16, torch.float16)
        self._packs = is_half and _has_arithmetic(dtype)
        self._tile = torch.empty(_TILE_BYTES // torch.float32.itemsize) if is_half and not self._packs else None

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_shared: bool = False) -> Linear:
        """`is_shared`: the weight is used elsewhere, too, and a second one in another order would cost its size again."""
        if self._tile is not None:
            return WidenedLinear(weight, bias, self._tile)
        if self._packs and not is_shared:
            return PackedLinear(weight, bias)
        return PlainLinear(weight, bias)


def _has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies numbers of a half-precision type itself."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
