"""The projector between a tower and a decoder: linear, GELU, linear."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from mmserve.models.weights import BadCheckpoint, Checkpoint


class Projector:
    """Frozen weights of one two-layer MLP."""

    def __init__(self, file: Path, num_in: int, device: torch.device, dtype: torch.dtype) -> None:
        """`num_in` is the tower's width; the decoder's is what the file says.  Raises BadCheckpoint."""
        inner, num_out = _widths(file)
        checkpoint = Checkpoint(file, device, dtype)
        self._first = (checkpoint.take("linear_1.weight", inner, num_in), checkpoint.take("linear_1.bias", inner))
        self._second = (checkpoint.take("linear_2.weight", num_out, inner), checkpoint.take("linear_2.bias", num_out))
        checkpoint.finish()
        self.num_out = num_out

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., num_in] -> [..., num_out]"""
        return F.linear(F.gelu(F.linear(hidden, *self._first)), *self._second)


def _widths(file: Path) -> tuple[int, int]:
    with safe_open(str(file), framework="pt") as tensors:
        if "linear_2.weight" not in tensors.keys():  # noqa: SIM118
            raise BadCheckpoint(f"{file}: missing linear_2.weight")
        num_out, inner = tensors.get_slice("linear_2.weight").get_shape()
    return inner, num_out
