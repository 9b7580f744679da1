"""How many KV blocks a worker can have: on the CPU what it was told, on a GPU what is left once the largest step has been run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mmserve.plan import DecoderWorkerSpec

# For what a trial can't show: fragmentation, and the memory of recorded steps, which are no larger than the trial itself.
RESERVE_BYTES = 256 * 2**20


def budget_bytes(spec: DecoderWorkerSpec, device: torch.device, largest_step: Callable[[], None]) -> int:
    """Bytes for the KV pool.  `largest_step` is run on a GPU only; what it allocates at its peak stays free for later ones."""
    if device.type != "cuda":
        return spec.kv_cache_memory_bytes
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    largest_step()
    torch.cuda.synchronize(device)
    activation_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return gpu_budget(free, total, spec.gpu_memory_utilization, activation_bytes)


def gpu_budget(free: int, total: int, utilization: float, activation_bytes: int) -> int:
    """Bytes of a GPU that a KV pool may take, with weights loaded: what is free, less the share to be left alone and what a step needs."""
    return int(free - total * (1 - utilization)) - activation_bytes - RESERVE_BYTES


def num_blocks(budget: int, block_bytes: int, block_size: int, *, max_num_seqs: int, max_model_len: int) -> int:
    """Whole blocks, and no more than all sequences at full length could ever hold.  Raises ValueError if two don't fit."""
    useful = max_num_seqs * -(-max_model_len // block_size)
    count = min(budget // block_bytes, useful)
    if count < 2:
        raise ValueError(f"a KV cache of {budget} bytes has no room for two blocks of {block_bytes} bytes")
    return count
