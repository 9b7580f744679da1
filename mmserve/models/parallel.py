"""Tensor parallelism: what each rank of a group holds of a decoder, and the two things ranks say to each other in a step.

Matrices that widen are cut by columns of their output, those that narrow by columns of their input, so that two sums a layer are all
that crosses (Shoeybi et al., "Megatron-LM").  The process group is torch.distributed's default one: NCCL on CUDA, gloo on the CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mmserve.plan import Rank


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal ones."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), got {self.rank}")

    def part(self, count: int) -> slice:
        """[start, stop) of `count`.  The last ranks get less, or nothing, where it doesn't divide."""
        width = self.width(count)
        return slice(min(self.rank * width, count), min((self.rank + 1) * width, count))

    def width(self, count: int) -> int:
        """What the first rank gets of `count`, and no rank more."""
        return -(-count // self.size)

    def of_kv_heads(self, num_kv_heads: int) -> Shard:
        """The part that this rank holds of key-value heads: where there are more ranks than heads, several hold the same one.

        Raises ValueError with both numbers if neither divides the other.
        """
        if num_kv_heads % self.size == 0:
            return self
        if self.size % num_kv_heads:
            raise ValueError(f"{num_kv_heads} key-value heads can neither be split nor repeated over {self.size} ranks")
        return Shard(self.rank * num_kv_heads // self.size, num_kv_heads)

    def require_part_each(self, count: int, what: str) -> None:
        """Raises ValueError with both numbers if some rank gets nothing of `count`."""
        if (self.size - 1) * self.width(count) >= count:
            raise ValueError(f"{count} {what} leave nothing for some of {self.size} ranks")

    def require_even(self, count: int, what: str) -> None:
        """Raises ValueError with both numbers."""
        if count % self.size:
            raise ValueError(f"{count} {what} can't be split over {self.size} ranks")

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each; `partial` is overwritten."""
        if self.size > 1:
            dist.all_reduce(partial)
        return partial

    def join(self, columns: torch.Tensor, count: int) -> torch.Tensor:
        """[R, width(count)] of every rank -> [R, count] on each."""
        if self.size == 1:
            return columns
        parts = [torch.empty_like(columns) for _ in range(self.size)]
        dist.all_gather(parts, columns)
        return torch.cat(parts, dim=1)[:, :count]

    def least(self, count: int) -> int:
        """The smallest count of all ranks."""
        if self.size == 1:
            return count
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        counts = torch.tensor([count], device=device)
        dist.all_reduce(counts, dist.ReduceOp.MIN)
        return int(counts.item())


WHOLE = Shard(0, 1)


def join_group(rank: Rank, device: torch.device) -> Shard:
    """Meet the other ranks of this life on this machine, and return what this one holds."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # never a name to look up, never a network
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rank.rendezvous.path}", rank=rank.rank, world_size=rank.size)
    return Shard(rank.rank, rank.size)
