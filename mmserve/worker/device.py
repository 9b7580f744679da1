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


def use_device(name: str) -> torch.device:
    """The device, made this process's own: what names none (streams, graphs, waiting) is then about this one, and no other is opened."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def pin(memory: SharedMemory, device: torch.device) -> None:
    """Lock the mapping's pages, so that a GPU copies from them by itself while the CPU goes on.  Raises RuntimeError if it can't."""
    if device.type != "cuda":
        return
    address = memory.array(BufferSlice(0, (memory.num_bytes,), "uint8")).ctypes.data
    error = torch.cuda.cudart().cudaHostRegister(address, memory.num_bytes, 0)
    if error.value != 0:
        raise RuntimeError(f"can't lock {memory.num_bytes} bytes of shared memory for {device}: {error}; see --shared-buffer-bytes")


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
