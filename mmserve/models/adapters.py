"""The projector between a tower and a decoder: linear, activation, linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from mmserve.composition import BadModel, Weights
from mmserve.models.weights import BadCheckpoint, Checkpoint


class Projector:
    """Frozen weights of one two-layer MLP."""

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
        inner, num_out = _widths(weights)
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


def _widths(weights: Weights) -> tuple[int, int]:
    try:
        headers = weights.headers()
    except BadModel as error:
        raise BadCheckpoint(str(error)) from error
    if "linear_2.weight" not in headers:
        raise BadCheckpoint(f"{weights.path}: missing linear_2.weight")
    num_out, inner = headers["linear_2.weight"].shape
    return inner, num_out
