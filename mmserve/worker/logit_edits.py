"""Penalties, bias and bans: what a request asks to have changed in its logits before a token is drawn.

The ids are gathered on the host over all rows, so that a step costs a few small copies to the device however many rows ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from mmserve.plan import RowSampling


def adjust(logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
    """fp32 [R, V], in place; ids beyond the vocabulary are passed over."""
    flat = logits.view(-1)

    def edit(entries: Iterable[tuple[int, np.ndarray, np.ndarray]], change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Each entry is a row, distinct ids of it, and a number for each."""
        parts = [
            (row * logits.shape[1] + ids[valid], values[valid]) for row, ids, values in entries if (valid := _valid(ids, logits)).any()
        ]
        if parts:
            places, amounts = (torch.from_numpy(np.concatenate(part)).to(logits.device) for part in zip(*parts, strict=True))
            flat[places] = change(flat[places], amounts)

    edit(_repetition(rows), lambda values, penalty: torch.where(values > 0, values / penalty, values * penalty))
    edit(_frequency(rows), torch.sub)
    edit(_bias(rows), torch.add)
    edit(_bans(rows), torch.add)


def _valid(ids: np.ndarray, logits: torch.Tensor) -> np.ndarray:
    return (ids >= 0) & (ids < logits.shape[1])


def _repetition(rows: Sequence[RowSampling]) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    for i, row in enumerate(rows):
        seen = [ids for ids in (row.prompt_ids, row.output_ids) if ids is not None]
        if row.repetition_penalty != 1 and seen:
            ids = np.unique(np.concatenate(seen)).astype(np.int64)
            yield i, ids, np.full(len(ids), row.repetition_penalty, np.float32)


def _frequency(rows: Sequence[RowSampling]) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    for i, row in enumerate(rows):
        if (row.presence_penalty or row.frequency_penalty) and row.output_ids is not None:
            ids, counts = np.unique(row.output_ids, return_counts=True)
            yield i, ids.astype(np.int64), (row.frequency_penalty * counts + row.presence_penalty).astype(np.float32)


def _bias(rows: Sequence[RowSampling]) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    for i, row in enumerate(rows):
        if row.logit_bias:
            yield i, np.array(list(row.logit_bias), np.int64), np.array(list(row.logit_bias.values()), np.float32)


def _bans(rows: Sequence[RowSampling]) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    for i, row in enumerate(rows):
        if row.banned_ids:
            yield i, np.array(row.banned_ids, np.int64), np.full(len(row.banned_ids), -np.inf, np.float32)
