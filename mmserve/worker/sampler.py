"""Draws the next token of every row that wants one.

A draw is a function of the row's own logits and (seed, position): neither the rest of the batch nor an earlier life of the worker
changes it.  Order: penalties, bias and bans, then temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mmserve.plan import RowSampling, SampledToken


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[SampledToken | None]:
    """fp32 logits [R, V], which may be overwritten -> one token a row, None where the logits aren't finite."""
    low, high = logits.aminmax(dim=-1)
    is_finite = (low.isfinite() & high.isfinite()).tolist()
    reports = [_Report(logits, i, row.logprobs) if row.logprobs is not None and is_finite[i] else None for i, row in enumerate(rows)]
    _adjust(logits, rows)
    token_ids = logits.argmax(dim=-1)
    random = [i for i, row in enumerate(rows) if row.temperature > 0 and is_finite[i]]
    if random:
        token_ids[random] = _draw(logits[random], [rows[i] for i in random])
    return [
        None if not ok else SampledToken(token_id) if report is None else report.token(token_id)
        for token_id, ok, report in zip(token_ids.tolist(), is_finite, reports, strict=True)
    ]


class _Report:
    """Log-probabilities of one row under the model's own distribution, taken before anything is adjusted."""

    def __init__(self, logits: torch.Tensor, row: int, num_top: int | None) -> None:
        self._logprobs = logits[row].log_softmax(dim=-1)
        self._num_top = min(num_top or 0, logits.shape[1])

    def token(self, token_id: int) -> SampledToken:
        values, ids = self._logprobs.topk(self._num_top)
        return SampledToken(token_id, float(self._logprobs[token_id]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _adjust(logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
    """Penalties, bias and bans, in place; ids beyond the vocabulary are passed over."""
    vocab_size = logits.shape[1]
    for i, row in enumerate(rows):
        if row.repetition_penalty != 1.0:
            seen = _ids(row.prompt_ids, row.output_ids, vocab_size)
            values = logits[i, seen]
            logits[i, seen] = torch.where(values > 0, values / row.repetition_penalty, values * row.repetition_penalty)
        if (row.presence_penalty or row.frequency_penalty) and row.output_ids is not None:
            counts = torch.bincount(_ids(row.output_ids, None, vocab_size), minlength=vocab_size).to(logits.device)
            logits[i] -= row.frequency_penalty * counts + row.presence_penalty * (counts > 0)
        for token_id, bias in (row.logit_bias or {}).items():
            if 0 <= token_id < vocab_size:
                logits[i, token_id] += bias
        if row.banned_ids:
            logits[i, [token_id for token_id in row.banned_ids if 0 <= token_id < vocab_size]] = -torch.inf


def _ids(first: np.ndarray | None, second: np.ndarray | None, vocab_size: int) -> torch.Tensor:
    present = [part for part in (first, second) if part is not None]
    ids = np.concatenate(present).astype(np.int64) if present else np.zeros(0, np.int64)
    return torch.from_numpy(ids[(ids >= 0) & (ids < vocab_size)])


def _draw(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Temperature, filters, and one Gumbel-max draw a row; int64 [R].

    A row drawn again after a worker's death has logits that differ in their last bits, since its batch does.  The Gumbel maximum then
    changes only if two scores are as close as those bits; an inverse CDF would, wherever its one number falls between two tokens' shares.
    """
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    # Relative to the best first: no temperature, however small, can then overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / column([row.temperature for row in rows])
    if any(row.min_p > 0 for row in rows):
        scaled.masked_fill_(scaled.exp() < column([row.min_p for row in rows]), -torch.inf)
    if any(row.top_k > 0 or row.top_p < 1 for row in rows):
        scaled = _keep_top(scaled, column([row.top_k or logits.shape[1] for row in rows]), column([row.top_p for row in rows]))
    noise = uniforms([row.seed for row in rows], [row.position for row in rows], logits.shape[1], device)
    return (scaled - noise.log().neg().log()).argmax(dim=-1)


def _keep_top(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """-inf for what is neither among the `top_k` best nor in the smallest set of them that holds `top_p`; ties go to the lower id."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered.masked_fill_((before >= top_p) & (rank > 0), -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def uniforms(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float64 [R, V] in (0, 1), a hash of (seed, position, token): rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014)."""

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([_signed(value) for value in values], dtype=torch.int64, device=device).unsqueeze(1)

    rows = _mix(_mix(column(seeds)) + column(positions))
    mixed = _mix(rows + torch.arange(vocab_size, device=device) * _GOLDEN)
    return (_shifted(mixed, 11).double() + 0.5) * 2.0**-53


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no uint64 arithmetic, but two's complement wraps the same way."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = value + _GOLDEN
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Right, filling with zeros."""
    return (value >> bits) & (2 ** (64 - bits) - 1)
