"""What a decoder asks of attention over paged keys and values.

Blocks are bytes here; who owns them is decided elsewhere.  A row reads only blocks of its own table, so a row that goes wrong can't
reach its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from mmserve.plan import BlockCopy, StepPlan

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The KV pool of one worker, and the heads that read it."""

    windows: tuple[int | None, ...]  # one per layer: how many keys a query sees, its own included; None: all up to its own
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Of all layers, keys and values."""
        return 2 * len(self.windows) * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class AttentionBackend(Protocol[P]):
    """A KV pool and the attention over it.  `P` is a step's index tensors, made once and shared by all layers."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def plan(self, step: StepPlan) -> P: ...

    def forward(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: P) -> torch.Tensor:
        """query [T, heads, D], key and value [T, kv_heads, D] -> [T, heads * D].  Keys and values go to the pool first."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def wipe(self, slots: np.ndarray) -> None:
        """Zero what was written to `slots` of all layers: a masked NaN is still a NaN once it is multiplied by weight 0."""
        ...


def zero_pools(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values.  On the CPU their pages take host memory only once they are written."""
    return _lazy_zeros(shape, device, dtype), _lazy_zeros(shape, device, dtype)


def _lazy_zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
