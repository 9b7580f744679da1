"""What the workers of both kinds need of the machine: threads, tensors over shared memory, and a name for running out of memory."""

from __future__ import annotations

import gc

import torch

from mmserve.shared_buffer import BufferSlice, SharedMemory

_CPU_ALLOCATOR = "DefaultCPUAllocator"  # the CPU's has no exception type of its own


def tensor_in(memory: SharedMemory, where: BufferSlice) -> torch.Tensor:
    """A writable view of a slice of the shared buffer, in its own dtype (bfloat16 too)."""
    tensor = torch.from_numpy(memory.array(where))
    return tensor.view(torch.bfloat16) if where.dtype == "bfloat16" else tensor


def set_num_threads(count: int) -> None:
    torch.set_num_threads(max(1, count))
    torch.set_num_interop_threads(1)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)


def release_memory(device: torch.device) -> None:
    """Give back what a failed attempt left behind, so that a smaller one has a chance."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
