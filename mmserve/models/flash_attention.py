"""Attention over KV pages by flash-attn 2.8: `flash_attn_with_kvcache` for decodes, `flash_attn_varlen_func` for prefills, never mixed.

Pages are multiples of 256 tokens (one table look-up per tile of keys), tables and lengths int32, heads in float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mmserve.models.attention import AttentionShape, zero_pools
from mmserve.plan import BlockCopy, StepPlan


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows of one query each.  A row of length 0 sees nothing and gives 0: the padding of a captured step."""

    tokens: torch.Tensor | None  # int64 [R], where the queries are among the T tokens; None: they are all there is, in order
    tables: torch.Tensor  # int32 [R, B]
    lengths: torch.Tensor  # int32 [R], keys of the row, its own included


@dataclass(frozen=True, slots=True)
class Prefills:
    """Rows of several queries, end to end."""

    tokens: torch.Tensor | None  # int64 [sum of queries]; None as above
    query_starts: torch.Tensor  # int32 [R + 1]
    key_starts: torch.Tensor  # int32 [R + 1]
    max_queries: int
    max_keys: int
    tables: torch.Tensor | None  # int32 [R, B]; None: nothing came before, the step's own keys are all of them


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """The index tensors of one step, shared by all layers."""

    slots: torch.Tensor  # int64 [T], where keys and values go
    parts: tuple[Decodes | Prefills, ...]  # every token is in exactly one


class FlashAttention:
    """One block more than is given out: what a padded row writes must go somewhere."""

    def __init__(self, shape: AttentionShape) -> None:
        # Imported here: it is installed only where it can run.
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._prefill_kernel = flash_attn_varlen_func
        self._decode_kernel = flash_attn_with_kvcache
        self.num_blocks = shape.num_blocks
        self.block_size = shape.block_size
        self._device = shape.device
        # flash-attn counts the keys to the left of the query's own.
        self._windows = [(-1, -1) if window is None else (window - 1, 0) for window in shape.windows]
        dims = (len(shape.windows), shape.num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._pools = zero_pools(dims, shape.device, shape.dtype)
        self._pages = [tuple(pool[layer] for pool in self._pools) for layer in range(len(shape.windows))]
        self._slots = [tuple(page.flatten(0, 1) for page in pages) for pages in self._pages]

    @property
    def scratch_slot(self) -> int:
        """A slot that no sequence owns."""
        return self.num_blocks * self.block_size

    def plan(self, step: StepPlan) -> FlashPlan:
        """Sort the rows of a step into decodes, prefills of new sequences and prefills behind cached keys."""
        counts = np.diff(step.query_starts)
        is_new = counts == step.context_lens
        kinds = (np.flatnonzero(counts == 1), np.flatnonzero((counts > 1) & is_new), np.flatnonzero((counts > 1) & ~is_new))
        decodes, new, continued = kinds
        parts: list[Decodes | Prefills] = []
        if len(decodes):
            tables, lengths = self._int32(step.block_tables[decodes]), self._int32(step.context_lens[decodes])
            parts.append(Decodes(self._tokens(step, decodes, counts), tables, lengths))
        parts += [self._prefills(step, rows, counts) for rows in (new, continued) if len(rows)]
        return FlashPlan(torch.from_numpy(step.slot_mapping.astype(np.int64)).to(self._device), tuple(parts))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for pool in self._pools:
                pool[:, copy.target, : copy.num_tokens] = pool[:, copy.source, : copy.num_tokens]

    def wipe(self, slots: np.ndarray) -> None:
        for pool in self._pools:
            pool.flatten(1, 2)[:, torch.from_numpy(slots.astype(np.int64)).to(self._device)] = 0

    def forward(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: FlashPlan) -> torch.Tensor:
        for pool, new in zip(self._slots[layer], (key, value), strict=True):
            pool.index_copy_(0, plan.slots, new)
        if len(plan.parts) == 1:
            return self._attend(layer, query, key, value, plan.parts[0]).flatten(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for part in plan.parts:
            assert part.tokens is not None, "a part with all tokens beside another"
            q, k, v = (tensor.index_select(0, part.tokens) for tensor in (query, key, value))
            output.index_copy_(0, part.tokens, self._attend(layer, q, k, v, part))
        return output.flatten(1)

    def _attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Decodes | Prefills) -> torch.Tensor:
        """Queries, and for new sequences keys and values, of one part -> [tokens, heads, D]."""
        pages, window = self._pages[layer], self._windows[layer]
        if isinstance(part, Decodes):
            lengths, tables = part.lengths, part.tables
            attended = self._decode_kernel(
                query.unsqueeze(1), *pages, cache_seqlens=lengths, block_table=tables, causal=True, window_size=window
            )
            return attended.squeeze(1)
        keys, values = (key, value) if part.tables is None else pages
        return self._prefill_kernel(
            query,
            keys,
            values,
            cu_seqlens_q=part.query_starts,
            cu_seqlens_k=part.key_starts,
            max_seqlen_q=part.max_queries,
            max_seqlen_k=part.max_keys,
            causal=True,
            window_size=window,
            block_table=part.tables,
        )

    def _prefills(self, step: StepPlan, rows: np.ndarray, counts: np.ndarray) -> Prefills:
        num_queries, num_keys = counts[rows], step.context_lens[rows]
        is_new = bool((num_queries == num_keys).all())
        return Prefills(
            tokens=self._tokens(step, rows, counts),
            query_starts=self._int32(_starts(num_queries)),
            key_starts=self._int32(_starts(num_keys)),
            max_queries=int(num_queries.max()),
            max_keys=int(num_keys.max()),
            tables=None if is_new else self._int32(step.block_tables[rows]),
        )

    def _tokens(self, step: StepPlan, rows: np.ndarray, counts: np.ndarray) -> torch.Tensor | None:
        if len(rows) == len(counts):
            return None
        tokens = np.flatnonzero(np.repeat(np.isin(np.arange(len(counts)), rows), counts))
        return torch.from_numpy(tokens).to(self._device)

    def _int32(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self._device)


def _starts(counts: np.ndarray) -> np.ndarray:
    """[R] -> [R + 1], where each of the runs laid end to end begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)])
