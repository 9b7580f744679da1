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


class StackingProjector:
    """Ultravox' projector: several positions side by side, norm, linear, gated activation, linear, and a norm before or behind the last."""

    def __init__(
        self,
        weights: Weights,
        num_in: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        stack_factor: int,
        inner_size: int,
        norm_is_mid: bool,
    ) -> None:
        """`num_in` is the tower's width; the decoder's is what the file says.  Raises BadCheckpoint."""
        num_out, _ = _shape(weights, "linear_2.weight")
        checkpoint = Checkpoint(weights.path, device, dtype, names=weights.names)
        self._stack_factor = stack_factor
        self._pre = checkpoint.take("ln_pre.weight", stack_factor * num_in)
        self._first = checkpoint.take("linear_1.weight", inner_size, stack_factor * num_in)
        self._second = checkpoint.take("linear_2.weight", num_out, inner_size // 2)
        self._mid = checkpoint.take("ln_mid.weight", inner_size // 2) if norm_is_mid else None
        self._post = None if norm_is_mid else checkpoint.take("ln_post.weight", num_out)
        checkpoint.finish()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[n, positions, num_in] -> [n, positions / stack_factor rounded up, num_out]; zeros fill the last stack."""
        states = F.pad(states, (0, 0, 0, -states.shape[1] % self._stack_factor))
        stacked = _norm(states.unflatten(1, (-1, self._stack_factor)).flatten(2), self._pre)
        values, gate = F.linear(stacked, self._first).chunk(2, dim=-1)
        return _norm(F.linear(_norm(F.silu(gate) * values, self._mid), self._second), self._post)


def _norm(states: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Llama's RMSNorm; without a weight there is none."""
    if weight is None:
        return states
    return weight * F.rms_norm(states.float(), weight.shape, eps=1e-6).to(states.dtype)


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
