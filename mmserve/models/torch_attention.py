"""KV pages and the attention over them in plain PyTorch: the path for CPUs, and the reference for every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from mmserve.models.attention import AttentionShape, zero_pools
from mmserve.plan import BlockCopy, StepPlan

_GATHER_BYTES = 2 * 2**20  # of keys gathered at once: what stays in a core's cache until it is used


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each that are attended together, each over the keys from the first block it sees."""

    tokens: torch.Tensor  # int64 [R], where the rows' queries are among the T tokens
    blocks: torch.Tensor  # int64 [R * kv_heads * B], a block of one head each
    mask: torch.Tensor | None  # [R, 1, 1, num_keys]: 0 where the row sees the key, else -inf; None if all see all
    num_keys: int  # of the row with the most


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several queries."""

    start: int  # its tokens among the T
    stop: int
    blocks: torch.Tensor  # int64 [kv_heads * B], no padding
    mask: torch.Tensor | None  # [queries, num_keys]: 0 where the query sees the key, else -inf; None: nothing came before
    num_keys: int


@dataclass(frozen=True, slots=True)
class Sight:
    """What the queries of a step see in the layers of one window."""

    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The index tensors of one step, shared by all layers."""

    places: torch.Tensor  # int64 [T * kv_heads], where each head's keys and values go
    sights: dict[int | None, Sight]  # by window


class TorchAttention:
    """Each block holds a head's keys one after the other, so that what is gathered is a matrix without another copy."""

    def __init__(self, shape: AttentionShape) -> None:
        self.num_blocks = shape.num_blocks
        self.block_size = shape.block_size
        self._shape = shape
        self._group_size = shape.num_heads // shape.num_kv_heads
        self._head_bytes = shape.block_size * shape.head_dim * shape.dtype.itemsize  # of one head's part of a block
        num_layers = len(shape.windows)
        dims = (num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self._pools = zero_pools(dims, shape.device, shape.dtype)
        # Views made once: at one row a step, making them each time is a good part of it.
        self._places = [tuple(pool[layer].flatten(0, 2) for pool in self._pools) for layer in range(num_layers)]
        self._blocks = [tuple(pool[layer].flatten(0, 1).flatten(1) for pool in self._pools) for layer in range(num_layers)]
        self._gathered = [torch.empty(0, device=shape.device, dtype=shape.dtype) for _ in self._pools]

    def plan(self, step: StepPlan) -> TorchPlan:
        """Sort the rows of a step into groups of decodes and single prefills, once for each window."""
        longest = int(step.context_lens.max())
        limits = {window: None if window is None or window >= longest else window for window in self._shape.windows}
        sights = {limit: self._sight(step, limit) for limit in set(limits.values())}
        return TorchPlan(self._indices(self._places_of(step.slot_mapping)), {window: sights[limit] for window, limit in limits.items()})

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for pool in self._pools:
                pool[:, copy.target, :, : copy.num_tokens] = pool[:, copy.source, :, : copy.num_tokens]

    def wipe(self, slots: np.ndarray) -> None:
        places = self._indices(self._places_of(slots))
        for pool in self._pools:
            pool.flatten(1, 3)[:, places] = 0

    def forward(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: TorchPlan) -> torch.Tensor:
        for pool, new in zip(self._places[layer], (key, value), strict=True):
            pool.index_copy_(0, plan.places, new.flatten(0, 1))
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        sight = plan.sights[self._shape.windows[layer]]
        for group in sight.groups:
            output.index_copy_(0, group.tokens, self._decode(layer, query.index_select(0, group.tokens), group))
        for row in sight.prefills:
            tokens = slice(row.start, row.stop)
            output[tokens] = self._prefill(layer, query[tokens], key[tokens], value[tokens], row)
        return output.flatten(1)

    def _decode(self, layer: int, query: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        num_rows = query.shape[0]
        keys, values = self._gather(layer, group.blocks, num_rows, group.num_keys)
        # The queries that share a key head become rows of one matrix.
        folded = query.view(num_rows, self._shape.num_kv_heads, self._group_size, self._shape.head_dim)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask).reshape(query.shape)

    def _prefill(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PrefillRow) -> torch.Tensor:
        if row.mask is None:
            keys, values = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
        else:
            keys, values = self._gather(layer, row.blocks, 1, row.num_keys)
        queries = query.transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=row.mask, is_causal=row.mask is None, enable_gqa=self._group_size > 1
        )
        return attended[0].transpose(0, 1)

    def _gather(self, layer: int, blocks: torch.Tensor, num_rows: int, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_rows, kv_heads, num_keys, D] twice, in buffers that the next call overwrites."""
        shape = self._shape
        views = []
        wanted = blocks.numel() * shape.block_size * shape.head_dim
        for i, pool in enumerate(self._blocks[layer]):
            if self._gathered[i].numel() < wanted:
                self._gathered[i] = torch.empty(wanted, device=shape.device, dtype=shape.dtype)
            target = self._gathered[i][:wanted].view(blocks.numel(), -1)
            torch.index_select(pool, 0, blocks, out=target)
            views.append(target.view(num_rows, shape.num_kv_heads, -1, shape.head_dim)[:, :, :num_keys])
        return views[0], views[1]

    def _sight(self, step: StepPlan, window: int | None) -> Sight:
        counts = np.diff(step.query_starts)
        first_queries = step.context_lens - counts
        # The block of the first key that the first query of a row sees
        first_blocks = np.zeros_like(counts) if window is None else np.maximum(first_queries - window + 1, 0) // self.block_size
        num_blocks = -(-step.context_lens // self.block_size) - first_blocks
        groups = self._groups(step, np.flatnonzero(counts == 1), first_blocks, num_blocks, window)
        prefills = [self._prefill_row(step, row, int(first_blocks[row]), window) for row in np.flatnonzero(counts > 1).tolist()]
        return Sight(tuple(groups), tuple(prefills))

    def _groups(
        self, step: StepPlan, rows: np.ndarray, first_blocks: np.ndarray, num_blocks: np.ndarray, window: int | None
    ) -> list[DecodeGroup]:
        """Rows of similar length together, as many as keep their keys in cache."""
        rows = rows[np.argsort(num_blocks[rows], kind="stable")]
        row_bytes = [count * self._shape.num_kv_heads * self._head_bytes for count in num_blocks[rows].tolist()]  # plain ints: no overflow
        groups = []
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and (stop + 1 - start) * row_bytes[stop] <= _GATHER_BYTES:
                stop += 1
            members = rows[start:stop]
            groups.append(self._group(step, members, first_blocks[members], num_blocks[members], window))
            start = stop
        return groups

    def _group(self, step: StepPlan, rows: np.ndarray, first_blocks: np.ndarray, num_blocks: np.ndarray, window: int | None) -> DecodeGroup:
        columns = np.arange(num_blocks.max())
        # Padding repeats the row's own first block: another row's block could hold anything.
        columns = np.where(columns < num_blocks[:, None], first_blocks[:, None] + columns, first_blocks[:, None])
        blocks = step.block_tables[rows[:, None], columns]
        starts, contexts = first_blocks * self.block_size, step.context_lens[rows]
        num_keys = int((contexts - starts).max())
        keys = starts[:, None] + np.arange(num_keys)
        is_visible = _is_visible(contexts[:, None] - 1, keys, window)
        mask = None if is_visible.all() else self._mask(is_visible)[:, None, None, :]
        return DecodeGroup(self._indices(step.query_starts[rows]), self._head_blocks(blocks), mask, num_keys)

    def _prefill_row(self, step: StepPlan, row: int, first_block: int, window: int | None) -> PrefillRow:
        start, stop, context_len = int(step.query_starts[row]), int(step.query_starts[row + 1]), int(step.context_lens[row])
        keys = np.arange(first_block * self.block_size, context_len)
        queries = np.arange(context_len - (stop - start), context_len)
        nothing_before = len(queries) == context_len and (window is None or window >= context_len)
        mask = None if nothing_before else self._mask(_is_visible(queries[:, None], keys, window))
        blocks = step.block_tables[row, first_block : -(-context_len // self.block_size)]
        return PrefillRow(start, stop, self._head_blocks(blocks[None]), mask, len(keys))

    def _head_blocks(self, blocks: np.ndarray) -> torch.Tensor:
        """Block ids [R, B] -> int64 [R * kv_heads * B], head by head."""
        num_kv_heads = self._shape.num_kv_heads
        return self._indices((blocks.astype(np.int64)[:, None] * num_kv_heads + np.arange(num_kv_heads)[:, None]).reshape(-1))

    def _places_of(self, slots: np.ndarray) -> np.ndarray:
        """Slots [T] -> int64 [T * kv_heads], the same token's heads next to each other."""
        blocks, offsets = np.divmod(slots.astype(np.int64), self.block_size)
        heads = blocks[:, None] * self._shape.num_kv_heads + np.arange(self._shape.num_kv_heads)
        return (heads * self.block_size + offsets[:, None]).reshape(-1)

    def _indices(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._shape.device)

    def _mask(self, is_visible: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.where(is_visible, np.float32(0), np.float32(-np.inf))).to(self._shape.device, self._shape.dtype)


def _is_visible(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    """Positions against positions: a query sees itself and what came before it, within its window."""
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
