"""From rows that were chosen to the arrays of a StepPlan.

A decode row costs a few plain integers: numpy enters once, at the end, over the finished arrays.  (Naive numpy per row made planning
256 sequences ten times slower.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmserve.plan import BlockCopy, MediaSlice, RowSampling, StepPlan
from mmserve.scheduler.cost_model import StepShape
from mmserve.scheduler.positions import has_grids, positions_between
from mmserve.scheduler.sequence import RowsOf, Sequence

_POSITION = RowSampling._fields.index("position")


class Row(NamedTuple):
    """Tokens [start, stop) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    stop: int
    epoch: int = 0  # of the sequence, when the step was planned


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """What a scheduler remembers of a step until its result comes."""

    step_id: int
    rows: tuple[Row, ...]
    shape: StepShape
    copied: frozenset[int]  # seq_ids whose blocks the step's copies were to fill

    def live_rows(self) -> list[Row]:
        """Of those who are still where they were when it was planned."""
        return [row for row in self.rows if row.sequence.epoch == row.epoch]

    def take_off(self) -> None:
        for row in self.rows:
            row.sequence.num_steps += 1

    def land(self) -> None:
        """It was answered, or never will be."""
        for row in self.rows:
            row.sequence.num_steps -= 1


def build_plan(
    step_id: int, rows: Rows[Row], before: Rows[Row], block_size: int, copies: tuple[BlockCopy, ...], rows_of: RowsOf
) -> StepPlan:
    """Everything one forward pass over `rows` needs.  Rows of media within them must be there.

    `before` are the rows of the step that runs just before it, if that hasn't landed yet.
    """
    token_ids, positions, slots = array("i"), array("i"), array("i")
    query_starts, context_lens = array("i", [0]), array("i")
    media: list[MediaSlice] = []
    index_before = {row.sequence.seq_id: index for index, row in enumerate(before)}
    sampled_by = array("i")
    sampling: list[RowSampling | None] = []
    among_pictures: list[tuple[int, np.ndarray]] = []  # token of the plan, and positions int32 [3, n] from there on
    for sequence, start, stop, _ in rows:
        block_ids = sequence.block_table.block_ids
        is_unknown = start == len(sequence.token_ids)  # a step in flight samples it
        sampled_by.append(index_before[sequence.seq_id] if is_unknown else -1)
        if stop == start + 1 and start >= sequence.media_stop:
            token_ids.append(0 if is_unknown else sequence.token_ids[start])
            positions.append(start + sequence.position_shift)
            slots.append(block_ids[start // block_size] * block_size + start % block_size)
        else:
            if start < sequence.media_stop:
                media += _media_slices(sequence, start, stop, len(token_ids), rows_of)
            token_ids += _ids(sequence, start, stop)
            if start < sequence.media_stop and has_grids(sequence.spans):
                among_pictures.append((len(positions), positions_between(sequence.spans, start, stop)))
            first = start + sequence.position_shift  # where there are pictures still, only room for what is written below
            positions.extend(range(first, first + stop - start))
            _add_slots(slots, block_ids, start, stop, block_size)
        query_starts.append(len(token_ids))
        context_lens.append(stop)
        sampling.append(_row_sampling(sequence, stop) if stop >= len(sequence.token_ids) else None)
    return StepPlan(
        step_id=step_id,
        seq_ids=tuple([row.sequence.seq_id for row in rows]),
        token_ids=_int32(token_ids),
        positions=_positions(positions, among_pictures),
        slot_mapping=_int32(slots),
        query_starts=_int32(query_starts),
        context_lens=_int32(context_lens),
        block_tables=_block_tables(rows, block_size),
        wants_token=np.array([row is not None for row in sampling], np.bool_),
        sampling=tuple(sampling),
        sampled_by=_int32(sampled_by),
        copies=copies,
        media=tuple(media),
    )


def _positions(positions: array[int], among_pictures: Rows[tuple[int, np.ndarray]]) -> np.ndarray:
    """int32 [1, T], or [3, T] when some tokens have a position of their own on each axis."""
    laid = _int32(positions)[np.newaxis]
    if among_pictures:
        laid = np.repeat(laid, 3, axis=0)
    for start, axes in among_pictures:
        laid[:, start : start + axes.shape[1]] = axes
    return laid


def _int32(numbers: array[int]) -> np.ndarray:
    return np.frombuffer(numbers, np.int32)


def _ids(sequence: Sequence, start: int, stop: int) -> array[int]:
    """Ids of [start, stop), with 0 under media: a placeholder has no row in the embedding table."""
    ids = sequence.token_ids[start:stop]
    if start < sequence.media_stop:
        for span in sequence.spans:
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                ids[first - start : last - start] = array("i", bytes((last - first) * ids.itemsize))
    return ids


def _media_slices(sequence: Sequence, start: int, stop: int, token_start: int, rows_of: RowsOf) -> list[MediaSlice]:
    slices = []
    for span in sequence.spans:
        first, last = max(span.start, start), min(span.stop, stop)
        if first < last:
            rows = rows_of(span.key)
            assert rows is not None, f"sequence {sequence.seq_id}: rows of [{span.start}, {span.stop}) went away"
            slices.append(MediaSlice(span.key, rows, first - span.start, last - first, token_start + first - start))
    return slices


def _add_slots(slots: array[int], block_ids: array[int], start: int, stop: int, block_size: int) -> None:
    while start < stop:
        index, offset = divmod(start, block_size)
        count = min(block_size - offset, stop - start)
        first = block_ids[index] * block_size + offset
        slots.extend(range(first, first + count))
        start += count


def _block_tables(rows: Rows[Row], block_size: int) -> np.ndarray:
    """int32 [S, B], B what the longest context of this step needs; the rest of a table isn't sent."""
    num_blocks = [-(-row.stop // block_size) for row in rows]
    width = max(num_blocks)
    padding = array("i", bytes(width * array("i").itemsize))
    tables = array("i")
    for row, count in zip(rows, num_blocks, strict=True):
        block_ids = row.sequence.block_table.block_ids
        tables += block_ids if len(block_ids) == count else block_ids[:count]
        if count < width:
            tables += padding[count:]
    return _int32(tables).reshape(len(rows), width)


def _row_sampling(sequence: Sequence, position: int) -> RowSampling:
    """How to draw the token at `position`, which follows the last one that is there or in flight."""
    kept = sequence.row_sampling
    if kept is not None:
        if kept.temperature == 0:
            return kept
        return RowSampling._make((*kept[:_POSITION], position, *kept[_POSITION + 1 :]))  # `_replace`, but faster
    params = sequence.sampling
    ids = np.array(sequence.token_ids, np.int32)
    repeats = params.repetition_penalty != 1
    penalized = repeats or params.presence_penalty != 0 or params.frequency_penalty != 0
    banned = position - sequence.num_prompt < params.min_tokens
    judged = position - sequence.num_prompt < sequence.num_judged
    sampling = RowSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=sequence.seed,
        position=position,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        prompt_ids=_text_ids(sequence, ids) if repeats else None,
        output_ids=ids[sequence.num_prompt :] if penalized else None,
        banned_ids=tuple(sorted(sequence.end_token_ids)) if banned else (),
        logit_bias=dict(params.logit_bias) or None,
        logprobs=params.logprobs,
        entropy=judged,
    )
    if not penalized and not banned and not judged:
        sequence.row_sampling = sampling
    return sampling


def _text_ids(sequence: Sequence, ids: np.ndarray) -> np.ndarray:
    """The prompt without its media rows: placeholders are no tokens that could be repeated."""
    is_text = np.ones(sequence.num_prompt, np.bool_)
    for span in sequence.spans:
        is_text[span.start : span.stop] = False
    return ids[: sequence.num_prompt][is_text]
