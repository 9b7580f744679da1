"""Steps that nobody asked for: a worker runs them before it reports ready."""

from __future__ import annotations

import numpy as np

from mmserve.plan import RowSampling, StepPlan


def prefill(num_queries: list[int], block_size: int) -> StepPlan:
    """New sequences of token 0, each in blocks of its own, from block 0 on."""
    counts = np.array(num_queries, np.int32)
    widths = -(-counts // block_size)
    firsts = np.cumsum(widths) - widths
    tables = np.where(np.arange(widths.max()) < widths[:, None], firsts[:, None] + np.arange(widths.max()), 0)
    return step(counts, counts, tables, block_size)


def decode(context_lens: list[int], tables: np.ndarray, block_size: int) -> StepPlan:
    """One token of each sequence, at the end of its context; tables int32 [S, B]."""
    contexts = np.array(context_lens, np.int32)
    return step(np.ones_like(contexts), contexts, tables, block_size)


def step(counts: np.ndarray, contexts: np.ndarray, tables: np.ndarray, block_size: int) -> StepPlan:
    """The last `counts` [S] tokens of sequences of `contexts` [S] tokens, all of them token 0; tables [S, B]."""
    positions = np.concatenate([np.arange(stop - count, stop) for count, stop in zip(counts, contexts, strict=True)])
    rows = np.repeat(np.arange(len(counts)), counts)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    return StepPlan(
        step_id=0,
        seq_ids=tuple(range(len(counts))),
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions[None].astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_lens=contexts,
        block_tables=tables.astype(np.int32),
        wants_token=np.ones(len(counts), np.bool_),
        sampling=(RowSampling(),) * len(counts),
        sampled_by=np.full(len(counts), -1, np.int32),
    )
