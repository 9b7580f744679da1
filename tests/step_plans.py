"""Step plans written by hand: the few lines of a scheduler that tests of a decoder worker need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mmserve.plan import BlockCopy, MediaSlice, RowSampling, StepPlan


@dataclass
class Row:
    """Tokens [start, stop) of a sequence are computed in this step; all before have been."""

    token_ids: Sequence[int]
    blocks: Sequence[int]
    start: int = 0
    stop: int | None = None
    sampling: RowSampling | None = field(default_factory=RowSampling)  # None: no token wanted


def step_plan(
    rows: Sequence[Row], block_size: int, *, step_id: int = 1, copies: Sequence[BlockCopy] = (), media: Sequence[MediaSlice] = ()
) -> StepPlan:
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    contexts = []
    for row in rows:
        stop = len(row.token_ids) if row.stop is None else row.stop
        ids += row.token_ids[row.start : stop]
        positions += range(row.start, stop)
        slots += [row.blocks[p // block_size] * block_size + p % block_size for p in range(row.start, stop)]
        starts.append(len(ids))
        contexts.append(stop)
    width = max(len(row.blocks) for row in rows)
    return StepPlan(
        step_id=step_id,
        seq_ids=tuple(range(len(rows))),
        token_ids=np.array(ids, np.int32),
        positions=np.array([positions], np.int32),
        slot_mapping=np.array(slots, np.int32),
        query_starts=np.array(starts, np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=np.array([[*row.blocks, *[0] * (width - len(row.blocks))] for row in rows], np.int32),
        wants_token=np.array([row.sampling is not None for row in rows], np.bool_),
        sampling=tuple(row.sampling for row in rows),
        sampled_by=np.full(len(rows), -1, np.int32),
        copies=tuple(copies),
        media=tuple(media),
    )


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
