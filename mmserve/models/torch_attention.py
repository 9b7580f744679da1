"""KV pages and the attention over them in plain PyTorch: the path for CPUs, and the reference for every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mmserve.models.attention import AttentionShape, zero_pools
from mmserve.models.attention_kernels import Bags, decodes_in_place, kernels_for
from mmserve.plan import BlockCopy, StepPlan

_GATHER_BYTES = 2 * 2**20  # of keys gathered at once: what stays in a core's cache until it is used


class Gathered(NamedTuple):
    """Where the blocks of a group or a row are brought together, keys or values; the next one's come to the same place."""

    blocks: torch.Tensor  # [R * kv_heads * B, block_size * D]
    matrices: torch.Tensor  # [R * kv_heads, B * block_size, D], the same memory


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each that are attended together, each over the keys from the first block it sees."""

    start: int  # its rows among all that have one query
    stop: int
    blocks: torch.Tensor  # int64 [R * kv_heads * B], a block of one head each
    mask: torch.Tensor | None  # [R * kv_heads, 1, num_keys]: 0 where the row sees the key, else -inf; None if all see all
    keys: Gathered
    values: Gathered
    bags: Bags | None  # None: values are to be gathered, too


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several queries."""

    start: int  # its tokens among the T
    stop: int
    blocks: torch.Tensor  # int64 [kv_heads * B], no padding
    mask: torch.Tensor | None  # [queries, num_keys]: 0 where the query sees the key, else -inf; None: all up to its own
    keys: Gathered
    values: Gathered
    num_keys: int
    is_new: bool  # nothing came before


@dataclass(frozen=True, slots=True)
class Sight:
    """What the queries of a step see in the layers of one window."""

    tokens: torch.Tensor | None  # int64 [R], where the groups' queries are among the T tokens; None: they are the tokens, in order
    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The index tensors of one step, shared by all layers."""

    places: torch.Tensor  # int64 [T * kv_heads], where each head's keys and values go
    sights: dict[int | None, Sight]  # by window


class TorchAttention:
    """Each head has a pool of its own, so that what is gathered is a matrix without another copy.

    Neighbouring blocks of a head are then neighbours in memory: where a sequence has such, reading them is twice as fast.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self.num_blocks = shape.num_blocks
        self.block_size = shape.block_size
        self._shape = shape
        self._kernels = kernels_for(shape.device, shape.dtype)
        self._head_bytes = shape.block_size * shape.head_dim * shape.dtype.itemsize  # of one head's part of a block
        num_layers = len(shape.windows)
        dims = (num_layers, shape.num_kv_heads, shape.num_blocks, shape.block_size, shape.head_dim)
        pools = zero_pools(dims, shape.device, shape.dtype)
        self._pools = tuple(pool.transpose(1, 2) for pool in pools)  # [layers, blocks, kv_heads, block_size, D]
        # Views made once: at one row a step, making them each time is a good part of it.
        self._places = [tuple(pool[layer].flatten(0, 2) for pool in pools) for layer in range(num_layers)]
        self._blocks = [tuple(pool[layer].flatten(0, 1).flatten(1) for pool in pools) for layer in range(num_layers)]
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
        for layer in self._places:
            for pool in layer:
                pool[places] = 0

    def forward(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: TorchPlan) -> torch.Tensor:
        for pool, new in zip(self._places[layer], (key, value), strict=True):
            pool.index_copy_(0, plan.places, new.flatten(0, 1))
        sight = plan.sights[self._shape.windows[layer]]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if sight.tokens is None:
            self._decode(layer, query, sight.groups, output)
        elif sight.groups:
            attended = query.new_empty(len(sight.tokens), *query.shape[1:])
            self._decode(layer, query.index_select(0, sight.tokens), sight.groups, attended)
            output.index_copy_(0, sight.tokens, attended)
        for row in sight.prefills:
            tokens = slice(row.start, row.stop)
            self._prefill(layer, query[tokens], key[tokens], value[tokens], row, output[tokens])
        return output.flatten(1)

    def _decode(self, layer: int, query: torch.Tensor, groups: Sequence[DecodeGroup], output: torch.Tensor) -> None:
        keys, values = self._blocks[layer]
        for group in groups:
            rows = slice(group.start, group.stop)
            torch.index_select(keys, 0, group.blocks, out=group.keys.blocks)
            if group.bags is not None:
                table = self._places[layer][1]
                decodes_in_place(query[rows], group.keys.matrices, table, group.bags, group.mask, output[rows])
            else:
                torch.index_select(values, 0, group.blocks, out=group.values.blocks)
                self._kernels.decodes(query[rows], group.keys.matrices, group.values.matrices, group.mask, output[rows])

    def _prefill(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PrefillRow, output: torch.Tensor
    ) -> None:
        if row.is_new:
            keys, values = key.transpose(0, 1), value.transpose(0, 1)
        else:
            for pool, gathered in zip(self._blocks[layer], (row.keys, row.values), strict=True):
                torch.index_select(pool, 0, row.blocks, out=gathered.blocks)
            keys, values = row.keys.matrices[:, : row.num_keys], row.values.matrices[:, : row.num_keys]
        self._kernels.prefill(query, keys, values, row.mask, output)

    def _sight(self, step: StepPlan, window: int | None) -> Sight:
        counts = np.diff(step.query_starts)
        first_queries = step.context_lens - counts
        # The block of the first key that the first query of a row sees
        first_blocks = np.zeros_like(counts) if window is None else np.maximum(first_queries - window + 1, 0) // self.block_size
        num_blocks = -(-step.context_lens // self.block_size) - first_blocks
        # Rows of similar length together
        decodes = np.flatnonzero(counts == 1)
        decodes = decodes[np.argsort(num_blocks[decodes], kind="stable")]
        groups = self._groups(step, decodes, first_blocks[decodes], num_blocks[decodes], window)
        prefills = [self._prefill_row(step, row, int(first_blocks[row]), window) for row in np.flatnonzero(counts > 1).tolist()]
        is_all_in_order = np.array_equal(decodes, np.arange(len(counts)))
        tokens = None if is_all_in_order else self._indices(step.query_starts[decodes])
        return Sight(tokens, tuple(groups), tuple(prefills))

    def _groups(
        self, step: StepPlan, rows: np.ndarray, first_blocks: np.ndarray, num_blocks: np.ndarray, window: int | None
    ) -> list[DecodeGroup]:
        """As many rows as keep their keys in cache."""
        row_bytes = [count * self._shape.num_kv_heads * self._head_bytes for count in num_blocks.tolist()]  # plain ints: no overflow
        groups = []
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and (stop + 1 - start) * row_bytes[stop] <= _GATHER_BYTES:
                stop += 1
            groups.append(self._group(step, rows, slice(start, stop), first_blocks[start:stop], num_blocks[start:stop], window))
            start = stop
        return groups

    def _group(
        self, step: StepPlan, rows: np.ndarray, part: slice, first_blocks: np.ndarray, num_blocks: np.ndarray, window: int | None
    ) -> DecodeGroup:
        members = rows[part]
        columns = np.arange(num_blocks.max())
        # Padding repeats the row's own first block: another row's block could hold anything.
        chosen = np.where(columns < num_blocks[:, None], first_blocks[:, None] + columns, first_blocks[:, None])
        blocks = step.block_tables[members[:, None], chosen]
        starts, contexts = first_blocks * self.block_size, step.context_lens[members]
        # Keys up to the end of the last block, since a part of a matrix would be copied.
        keys = starts[:, None] + np.arange(len(columns) * self.block_size)
        is_visible = _is_visible(contexts[:, None] - 1, keys, window)
        mask = None if is_visible.all() else self._mask(is_visible.repeat(self._shape.num_kv_heads, axis=0))[:, None]
        return DecodeGroup(part.start, part.stop, self._head_blocks(blocks), mask, *self._places_to_gather(blocks), self._bags(blocks))

    def _prefill_row(self, step: StepPlan, row: int, first_block: int, window: int | None) -> PrefillRow:
        start, stop, context_len = int(step.query_starts[row]), int(step.query_starts[row + 1]), int(step.context_lens[row])
        keys = np.arange(first_block * self.block_size, context_len)
        queries = np.arange(context_len - (stop - start), context_len)
        is_new = len(queries) == context_len
        needs_mask = not (is_new or self._kernels.knows_order) or (window is not None and window < context_len)
        mask = self._mask(_is_visible(queries[:, None], keys, window)) if needs_mask else None
        blocks = step.block_tables[row : row + 1, first_block : -(-context_len // self.block_size)]
        return PrefillRow(start, stop, self._head_blocks(blocks), mask, *self._places_to_gather(blocks), len(keys), is_new)

    def _bags(self, blocks: np.ndarray) -> Bags | None:
        shape = self._shape
        num_shared = shape.num_heads // shape.num_kv_heads
        if num_shared > self._kernels.max_in_place:
            return None
        heads = np.arange(shape.num_kv_heads)[:, None]
        first_places = (heads * self.num_blocks + blocks[:, None].astype(np.int64)) * shape.block_size  # [R, kv_heads, B]
        places = first_places[:, :, None, :, None] + np.arange(shape.block_size)
        num_keys = blocks.shape[1] * shape.block_size
        repeated = np.broadcast_to(places, (*first_places.shape[:2], num_shared, *places.shape[3:])).reshape(-1)
        return Bags(self._indices(repeated), self._indices(np.arange(0, len(repeated), num_keys)))

    def _places_to_gather(self, blocks: np.ndarray) -> tuple[Gathered, Gathered]:
        """For keys and values of block ids [R, B].  Made once a step: at one row, making views is a good part of it."""
        shape = self._shape
        num_blocks = blocks.size * shape.num_kv_heads
        wanted = num_blocks * shape.block_size * shape.head_dim
        places = []
        for i, buffer in enumerate(self._gathered):
            if buffer.numel() < wanted:
                self._gathered[i] = torch.empty(wanted, device=shape.device, dtype=shape.dtype)
            target = self._gathered[i][:wanted]
            matrices = target.view(len(blocks) * shape.num_kv_heads, -1, shape.head_dim)
            places.append(Gathered(target.view(num_blocks, -1), matrices))
        return places[0], places[1]

    def _head_blocks(self, blocks: np.ndarray) -> torch.Tensor:
        """Block ids [R, B] -> int64 [R * kv_heads * B], head by head."""
        heads = np.arange(self._shape.num_kv_heads)
        return self._indices((heads[:, None] * self.num_blocks + blocks[:, None]).reshape(-1))

    def _places_of(self, slots: np.ndarray) -> np.ndarray:
        """Slots [T] -> int64 [T * kv_heads], the same token's heads next to each other."""
        blocks, offsets = np.divmod(slots.astype(np.int64), self.block_size)
        head_blocks = np.arange(self._shape.num_kv_heads) * self.num_blocks + blocks[:, None]
        return (head_blocks * self.block_size + offsets[:, None]).reshape(-1)

    def _indices(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._shape.device)

    def _mask(self, is_visible: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.where(is_visible, np.float32(0), np.float32(-np.inf))).to(self._shape.device, self._shape.dtype)


def _is_visible(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    """Positions against positions: a query sees itself and what came before it, within its window."""
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
