"""What a decoder asks of attention over paged keys and values, and which backend a worker gets.

Blocks are bytes here; who owns them is decided elsewhere.  A row reads only blocks of its own table, so a row that goes wrong can't
reach its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from mmserve.config import FLASH_BLOCK_SIZE, has_flash_attn
from mmserve.plan import BlockCopy, StepPlan

log = logging.getLogger(__name__)

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


def attention_for(shape: AttentionShape) -> Callable[[AttentionShape], AttentionBackend]:
    """flash-attn where it can run; elsewhere PyTorch's own kernels, which on a GPU is worth a warning."""
    if shape.device.type == "cuda":
        obstacle = flash_obstacle(shape, torch.cuda.get_device_capability(shape.device))
        if obstacle is None:
            from mmserve.models.flash_attention import FlashAttention

            return FlashAttention
        log.warning("attention without flash-attn, slower and without CUDA graphs: %s", obstacle)
    from mmserve.models.torch_attention import TorchAttention

    return TorchAttention


def flash_obstacle(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Why flash-attn 2.8 can't serve this shape on a GPU of this compute capability, or None if it can."""
    if not has_flash_attn():
        return "it is not installed; pip install --no-build-isolation 'flash-attn>=2.8.3,<2.8.4'"
    if capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim > 256 or shape.head_dim % 8:
        return f"it takes heads of at most 256 and a multiple of 8, not {shape.head_dim}"
    if shape.block_size % FLASH_BLOCK_SIZE:
        return f"it takes blocks of a multiple of {FLASH_BLOCK_SIZE} tokens, not {shape.block_size}"
    return None


def zero_pools(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values.  On the CPU their pages take host memory only once they are written."""
    return _lazy_zeros(shape, device, dtype), _lazy_zeros(shape, device, dtype)


def _lazy_zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
