"""KV pages and the attention over them in plain PyTorch: the path for CPUs, and the reference for every other.

Blocks are bytes here; who owns them is decided elsewhere.  A row reads only blocks of its own table, so a row that goes wrong can't
reach its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from mmserve.plan import BlockCopy, StepPlan

_GATHER_BYTES = 2 * 2**20  # of keys gathered at once: what stays in a core's cache until it is used


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each that are attended together; contexts are padded to the longest."""

    tokens: torch.Tensor  # int64 [R], where the rows' queries are among the T tokens
    blocks: torch.Tensor  # int64 [R * B]
    mask: torch.Tensor | None  # [R, 1, 1, longest]: 0 within the context, -inf beyond; None if all are equally long
    longest: int  # context of the group


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several queries."""

    start: int  # its tokens among the T
    stop: int
    context_len: int
    blocks: torch.Tensor  # int64 [B], no padding
    mask: torch.Tensor | None  # [queries, context_len]: 0 up to the query's own position, -inf beyond; None: nothing came before


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The index tensors of one step, shared by all layers."""

    slots: torch.Tensor  # int64 [T]
    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]


class PagedAttention:
    """The KV pool of one worker and the attention over it."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_kv_heads = num_kv_heads
        self._group_size = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._device = device
        self._dtype = dtype
        self._block_bytes = block_size * num_kv_heads * head_dim * dtype.itemsize
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self._pools = (_lazy_zeros(shape, device, dtype), _lazy_zeros(shape, device, dtype))  # keys, values
        # Views made once: at one row a step, making them each time is a good part of it.
        self._slots = [tuple(pool[layer].flatten(0, 1) for pool in self._pools) for layer in range(num_layers)]
        self._blocks = [tuple(pool[layer].flatten(1) for pool in self._pools) for layer in range(num_layers)]
        self._gathered = [torch.empty(0, device=device, dtype=dtype) for _ in self._pools]

    def plan(self, step: StepPlan) -> AttentionPlan:
        """Sort the rows of a step into groups of decodes and single prefills."""
        counts = np.diff(step.query_starts)
        num_blocks = -(-step.context_lens // self.block_size)
        decodes = np.flatnonzero(counts == 1)
        prefills = [self._prefill_row(step, row, num_blocks) for row in np.flatnonzero(counts > 1).tolist()]
        return AttentionPlan(self._indices(step.slot_mapping), tuple(self._groups(step, decodes, num_blocks)), tuple(prefills))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for pool in self._pools:
                pool[:, copy.target, : copy.num_tokens] = pool[:, copy.source, : copy.num_tokens]

    def wipe(self, slots: torch.Tensor) -> None:
        """Zero what was written to `slots` of all layers: a masked NaN is still a NaN once it is multiplied by weight 0."""
        for pool in self._pools:
            pool.flatten(1, 2)[:, slots] = 0

    def forward(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """query [T, heads, D], key and value [T, kv_heads, D] -> [T, heads * D].  Keys and values go to the pool first."""
        for pool, new in zip(self._slots[layer], (key, value), strict=True):
            pool.index_copy_(0, plan.slots, new)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in plan.groups:
            output.index_copy_(0, group.tokens, self._decode(layer, query.index_select(0, group.tokens), group))
        for row in plan.prefills:
            tokens = slice(row.start, row.stop)
            output[tokens] = self._prefill(layer, query[tokens], key[tokens], value[tokens], row)
        return output.flatten(1)

    def _decode(self, layer: int, query: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        num_rows = query.shape[0]
        keys, values = self._gather(layer, group.blocks, num_rows, group.longest)
        # The queries that share a key head become rows of one matrix.
        folded = query.view(num_rows, self._num_kv_heads, self._group_size, self._head_dim)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask)
        return attended.reshape(query.shape)

    def _prefill(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PrefillRow) -> torch.Tensor:
        if row.mask is None:
            keys, values = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
        else:
            keys, values = self._gather(layer, row.blocks, 1, row.context_len)
        queries = query.transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=row.mask, is_causal=row.mask is None, enable_gqa=self._group_size > 1
        )
        return attended[0].transpose(0, 1)

    def _gather(self, layer: int, blocks: torch.Tensor, num_rows: int, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_rows, kv_heads, context_len, D] twice, in buffers that the next call overwrites."""
        views = []
        wanted = blocks.numel() * self._block_bytes // self._dtype.itemsize
        for i, pool in enumerate(self._blocks[layer]):
            if self._gathered[i].numel() < wanted:
                self._gathered[i] = torch.empty(wanted, device=self._device, dtype=self._dtype)
            target = self._gathered[i][:wanted].view(blocks.numel(), -1)
            torch.index_select(pool, 0, blocks, out=target)
            contexts = target.view(num_rows, -1, self._num_kv_heads, self._head_dim)
            views.append(contexts[:, :context_len].transpose(1, 2))
        return views[0], views[1]

    def _groups(self, step: StepPlan, rows: np.ndarray, num_blocks: np.ndarray) -> list[DecodeGroup]:
        """Rows of similar length together, as many as keep their keys in cache."""
        rows = rows[np.argsort(num_blocks[rows], kind="stable")]
        row_bytes = [length * self._block_bytes for length in num_blocks[rows].tolist()]  # plain ints: int32 would overflow
        groups = []
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and (stop + 1 - start) * row_bytes[stop] <= _GATHER_BYTES:
                stop += 1
            groups.append(self._group(step, rows[start:stop], num_blocks))
            start = stop
        return groups

    def _group(self, step: StepPlan, rows: np.ndarray, num_blocks: np.ndarray) -> DecodeGroup:
        width = int(num_blocks[rows].max())
        table = step.block_tables[rows, :width]
        # Padding repeats the row's own first block: another row's block could hold anything.
        table = np.where(np.arange(width) < num_blocks[rows, None], table, table[:, :1])
        contexts = step.context_lens[rows]
        longest = int(contexts.max())
        mask = None if contexts.min() == longest else self._mask(np.arange(longest) < contexts[:, None])[:, None, None, :]
        return DecodeGroup(self._indices(step.query_starts[rows]), self._indices(table.reshape(-1)), mask, longest)

    def _prefill_row(self, step: StepPlan, row: int, num_blocks: np.ndarray) -> PrefillRow:
        start, stop, context_len = int(step.query_starts[row]), int(step.query_starts[row + 1]), int(step.context_lens[row])
        first = context_len - (stop - start)
        mask = None if first == 0 else self._mask(np.arange(context_len) <= np.arange(first, context_len)[:, None])
        return PrefillRow(start, stop, context_len, self._indices(step.block_tables[row, : num_blocks[row]]), mask)

    def _indices(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _mask(self, is_visible: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.where(is_visible, np.float32(0), np.float32(-np.inf))).to(self._device, self._dtype)


def _lazy_zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages take host memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
