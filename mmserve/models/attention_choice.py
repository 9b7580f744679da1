"""Which attention backend a worker gets."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from mmserve.config import FLASH_BLOCK_SIZE, has_flash_attn
from mmserve.models.attention import AttentionBackend, AttentionShape
from mmserve.models.flash_attention import FlashAttention
from mmserve.models.torch_attention import TorchAttention

log = logging.getLogger(__name__)


def attention_for(shape: AttentionShape) -> Callable[[AttentionShape], AttentionBackend]:
    """flash-attn where it can run; elsewhere PyTorch's own kernels, which on a GPU is worth a warning."""
    if shape.device.type == "cuda":
        obstacle = flash_obstacle(shape, torch.cuda.get_device_capability(shape.device))
        if obstacle is None:
            return FlashAttention
        log.warning("attention without flash-attn, slower and without CUDA graphs: %s", obstacle)
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
