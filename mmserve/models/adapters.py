"""Projectors between a tower and a decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from mmserve.composition import BadModel, Weights
from mmserve.models.weights import BadCheckpoint, Checkpoint


class Projector:
    """Linear, activation, linear."""

    def __init__(
        self,
        weights: Weights,
        num_in: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        activation: str = "gelu",
        has_bias: bool = True,
        has_newline: bool = False,
    ) -> None:
        """`num_in` is the tower's width; the decoder's is what the file says.  Raises BadCheckpoint."""
        num_out, inner = _shape(weights, "linear_2.weight")
        checkpoint = Checkpoint(weights.path, device, dtype, names=weights.names)

        def layer(name: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            return checkpoint.take(f"{name}.weight", rows, columns), checkpoint.take(f"{name}.bias", rows) if has_bias else None

        self._first = layer("linear_1", inner, num_in)
        self._second = layer("linear_2", num_out, inner)
        self.newline = checkpoint.take("image_newline", num_out) if has_newline else None
        checkpoint.finish()
        self._activation = ACT2FN[activation]
        self.num_out = num_out

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., num_in] -> [..., num_out]"""
        return F.linear(self._activation(F.linear(hidden, *self._first)), *self._second)


class LinearProjector:
    """One linear map."""

    def __init__(self, weights: Weights, num_in: int, device: torch.device, dtype: torch.dtype) -> None:
        """`num_in` is the tower's width; the decoder's is what the file says.  Raises BadCheckpoint."""
        num_out, _ = _shape(weights, "linear.weight")
        checkpoint = Checkpoint(weights.path, device, dtype, names=weights.names)
        self._weight = checkpoint.take("linear.weight", num_out, num_in)
        self._bias = checkpoint.take("linear.bias", num_out)
        checkpoint.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., num_in] -> [..., num_out]"""
        return F.linear(hidden, self._weight, self._bias)


def _shape(weights: Weights, name: str) -> tuple[int, int]:
    """Of a matrix.  Raises BadCheckpoint when it isn't there, or is none."""
    try:
        headers = weights.headers()
    except BadModel as error:
        raise BadCheckpoint(str(error)) from error
    if name not in headers:
        raise BadCheckpoint(f"{weights.path}: missing {name}")
    if len(headers[name].shape) != 2:
        raise BadCheckpoint(f"{weights.path}: {name} has shape {list(headers[name].shape)}, expected a matrix")
    rows, columns = headers[name].shape
    return rows, columns
