"""Attention over keys and values that lie together, in two ways: PyTorch's own kernel, and plain matrix products.

The second is for a CPU that multiplies bfloat16 itself: there PyTorch's kernel multiplies one head of one row at a time, in pieces too
small for oneDNN to be quick at.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from mmserve.models.linear import has_arithmetic

_NUM_QUERIES = 96  # of a prompt, multiplied at once: the part of their own keys that they may not see is computed in vain
_NUM_SCORES = 2**21  # at once: what stays in cache and what the allocator keeps, so that the next piece meets no page faults


class Bags(NamedTuple):
    """Which values the queries of several rows see."""

    places: torch.Tensor  # int64 [R * heads * num_keys], rows of a table of values
    starts: torch.Tensor  # int64 [R * heads], where each query's begin


class AttentionKernels(Protocol):
    knows_order: bool  # whether a prefill without a mask may have more keys than queries
    max_in_place: int  # query heads of a key head, up to which `decodes_in_place` is quicker than `decodes`

    def decodes(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, output: torch.Tensor
    ) -> None:
        """One query a row: query and output [R, heads, D], keys and values [R * kv_heads, num_keys, D].

        `mask` is added to the scores, [R * kv_heads, 1, num_keys]; None: a query sees all.
        """
        ...

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, output: torch.Tensor
    ) -> None:
        """The last T tokens of one row: query and output [T, heads, D], keys and values [kv_heads, num_keys, D].

        `mask` is added to the scores, [T, num_keys]; None: a query sees all keys up to its own.
        """
        ...


def kernels_for(device: torch.device, dtype: torch.dtype) -> AttentionKernels:
    """`dtype` is of queries, keys and values."""
    is_quick = device.type == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and has_arithmetic(dtype)
    return ProductKernels() if is_quick else FusedKernels()


class FusedKernels:
    """PyTorch's own."""

    knows_order = False
    max_in_place = 0

    def decodes(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, output: torch.Tensor
    ) -> None:
        num_rows, num_heads, head_dim = query.shape
        keys, values = keys.unflatten(0, (num_rows, -1)), values.unflatten(0, (num_rows, -1))
        num_kv_heads = keys.shape[1]
        # The queries that share a key head become rows of one matrix.
        folded = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        added = None if mask is None else mask.unflatten(0, (num_rows, -1))
        output.view(folded.shape).copy_(F.scaled_dot_product_attention(folded, keys, values, attn_mask=added))

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, output: torch.Tensor
    ) -> None:
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0),
            attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] > len(keys),
        )  # fmt: skip
        output.copy_(attended[0].transpose(0, 1))


class ProductKernels:
    """Scores are rounded to bfloat16, as they are in the eager attention of transformers; their softmax is taken in float32."""

    knows_order = True
    max_in_place = 4

    def decodes(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, output: torch.Tensor
    ) -> None:
        weights = _weights(query, keys, mask)
        torch.bmm(weights, values, out=output.view(*weights.shape[:2], -1))

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, output: torch.Tensor
    ) -> None:
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, num_keys, _ = keys.shape
        queries, grouped = (heads.view(num_tokens, num_kv_heads, -1, head_dim) for heads in (query, output))
        step = min(_NUM_QUERIES, max(16, _NUM_SCORES // (num_heads * num_keys)))
        later = query.new_full((step, step), -torch.inf).triu_(1).unsqueeze(1)
        for start in range(0, num_tokens, step):
            stop = min(start + step, num_tokens)
            seen = num_keys - num_tokens + stop
            rows = queries[start:stop].transpose(0, 1)  # [kv_heads, queries, group, D]
            scores = _scores(rows.flatten(1, 2), keys[:, :seen])
            by_query = scores.view(*rows.shape[:3], seen)
            if mask is None:
                by_query[..., seen - (stop - start) :].add_(later[: stop - start, :, : stop - start])
            else:
                by_query.add_(mask[start:stop, None, :seen])
            attended = torch.bmm(scores.softmax(-1), values[:, :seen])
            grouped[start:stop] = attended.view(rows.shape).transpose(0, 1)


def decodes_in_place(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bags: Bags, mask: torch.Tensor | None, output: torch.Tensor
) -> None:
    """`ProductKernels.decodes` over values that stay where they are, in a table [N, D]: a weighted sum of a table's rows is a bag."""
    weights = _weights(query, keys, mask).view(-1)
    attended, *_ = torch.embedding_bag(values, bags.places, bags.starts, per_sample_weights=weights)
    output.copy_(attended.view(output.shape))


def _weights(query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Of one query a row [R, heads, D] -> [R * kv_heads, heads / kv_heads, num_keys]"""
    return _scores(query.reshape(len(keys), -1, query.shape[-1]), keys, mask).softmax(-1)


def _scores(queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[B, Q, D] against [B, K, D] -> [B, Q, K]"""
    added, beta = (queries.new_zeros(()), 0) if mask is None else (mask, 1)
    return torch.baddbmm(added, queries, keys.transpose(1, 2), beta=beta, alpha=queries.shape[-1] ** -0.5)
