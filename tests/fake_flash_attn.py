"""The two functions of flash-attn 2.8 that we call: every documented constraint asserted, the result computed the slow way.

Put it in `sys.modules["flash_attn"]`.  Sums are in fp32 and only the result is rounded, as in the real kernels.
"""

from __future__ import annotations

from itertools import pairwise

import torch

PAGE_UNIT = 256  # tokens


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, heads, D]; k and v [T, kv_heads, D], or pages [N, page, kv_heads, D] with a table."""
    assert causal, "we never attend to what comes after"
    _check_heads(q, k, v)
    num_rows = len(cu_seqlens_q) - 1
    for starts, longest, total in (
        (cu_seqlens_q, max_seqlen_q, len(q)),
        (cu_seqlens_k, max_seqlen_k, None if block_table is not None else len(k)),
    ):
        _check_int32(starts)
        assert starts.is_contiguous()
        assert starts.shape == (num_rows + 1,)
        assert starts[0] == 0
        assert int(starts.diff().min()) > 0, "a row without queries or keys"
        assert int(starts.diff().max()) == longest
        assert type(longest) is int
        assert total is None or starts[-1] == total
    if block_table is None:
        assert k.dim() == v.dim() == 3
    else:
        _check_pages(k, v, block_table, num_rows)
    output = torch.empty(q.shape, dtype=q.dtype)
    for row, ((start, stop), (first, last)) in enumerate(
        zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    ):
        if block_table is None:
            keys, values = k[first:last], v[first:last]
        else:
            keys, values = (_paged(pool, block_table[row], last - first) for pool in (k, v))
        output[start:stop] = _attend(q[start:stop], keys, values, window_size)
    return output


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """q [R, queries, heads, D] and pages [N, page, kv_heads, D]; the last query stands at the last key.  A row without keys gives 0."""
    assert causal
    assert q.dim() == 4
    _check_heads(q, k_cache, v_cache)
    _check_pages(k_cache, v_cache, block_table, len(q))
    _check_int32(cache_seqlens)
    assert cache_seqlens.is_contiguous()
    assert cache_seqlens.shape == (len(q),)
    assert int(cache_seqlens.min()) >= 0
    output = torch.zeros(q.shape, dtype=q.dtype)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            keys, values = (_paged(pool, block_table[row], length) for pool in (k_cache, v_cache))
            output[row] = _attend(q[row], keys, values, window_size)
    return output


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window_size: tuple[int, int]) -> torch.Tensor:
    """[Q, heads, D] over [K, kv_heads, D]; the last query stands at the last key."""
    left, right = window_size
    assert right in (-1, 0), "causal sees nothing to the right"
    group = query.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float().repeat_interleave(group, dim=1)) / query.shape[-1] ** 0.5
    positions = torch.arange(len(keys))
    distance = positions[-len(query) :, None] - positions
    is_seen = (distance >= 0) & ((distance <= left) | (left < 0))
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.float().repeat_interleave(group, dim=1)).to(query.dtype)


def _paged(pool: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    page = pool.shape[1]
    return torch.cat([pool[int(block)] for block in table[: -(-length // page)]])[:length]


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), q.dtype
    assert k.dtype == v.dtype == q.dtype
    assert k.shape == v.shape
    head_dim = q.shape[-1]
    assert head_dim == k.shape[-1]
    assert head_dim <= 256
    assert head_dim % 8 == 0
    assert q.shape[-2] % k.shape[-2] == 0
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v)), "the last dimension must be contiguous"
    assert len(q) > 0, "no rows"


def _check_pages(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, num_rows: int) -> None:
    assert k.dim() == v.dim() == 4
    assert k.shape[1] % PAGE_UNIT == 0, f"pages of {k.shape[1]}"
    _check_int32(table)
    assert table.dim() == 2
    assert len(table) == num_rows
    assert table.stride(-1) == 1
    assert 0 <= int(table.min()) <= int(table.max()) < len(k), "a table names a page that doesn't exist"


def _check_int32(tensor: torch.Tensor) -> None:
    assert tensor.dtype == torch.int32, tensor.dtype
