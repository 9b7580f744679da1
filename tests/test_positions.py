"""Rotary positions among pictures: Qwen2-VL's rule, whatever way the tokens are handed out."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.media import MediaKind, MediaSpan
from mmserve.request import SamplingParams
from mmserve.scheduler.plan_builder import Row, build_plan
from mmserve.scheduler.positions import positions_between
from mmserve.scheduler.sequence import Sequence
from mmserve.shared_buffer import BufferSlice

PIECES = st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(1, 4), st.integers(1, 4)), st.just("clip")), min_size=1, max_size=6)


def picture(start: int, down: int, across: int) -> MediaSpan:
    return MediaSpan(b"p" * 32, MediaKind.IMAGE, start, start + down * across, (down, across))


def clip(start: int, stop: int) -> MediaSpan:
    return MediaSpan(b"c" * 32, MediaKind.AUDIO, start, stop)


def sequence(num_tokens: int, *spans: MediaSpan) -> Sequence:
    made = Sequence(1, array("i", range(num_tokens)), SamplingParams(), spans=spans)
    made.block_table.block_ids.extend(range(64))
    return made


def planned(*rows: Row) -> np.ndarray:
    return build_plan(1, rows, (), 16, (), lambda key: BufferSlice(0, (64, 4), "float32")).positions


def slow_positions(spans: list[MediaSpan], num_tokens: int) -> list[list[int]]:
    """Token by token, the largest so far in hand."""
    positions, largest = [], -1
    for index in range(num_tokens):
        span = next((span for span in spans if span.grid and span.start <= index < span.stop), None)
        if span is None:
            positions.append([largest + 1] * 3)
        else:
            if index == span.start:
                base = largest + 1
            row = index - span.start
            positions.append([base, base + row // span.grid[1], base + row % span.grid[1]])
        if span is None or index == span.stop - 1:
            largest = max(max(each) for each in positions)
    return positions


def test_a_picture_lies_on_two_axes_and_words_go_on_behind_its_longer_side() -> None:
    assert positions_between([picture(2, 2, 3)], 0, 10).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


@settings(deadline=None)
@given(PIECES, st.data())
def test_any_part_of_a_sequence_has_the_positions_it_has_in_the_whole(pieces: list, data: st.DataObject) -> None:
    spans, stop = [], 0
    for piece in pieces:
        if isinstance(piece, tuple):
            spans.append(picture(stop, *piece))
            stop = spans[-1].stop
        elif piece == "clip":
            spans.append(clip(stop, stop + 3))
            stop += 3
        else:
            stop += piece
    stop += 3
    whole = np.array(slow_positions(spans, stop)).T
    first = data.draw(st.integers(0, stop - 1))
    last = data.draw(st.integers(first + 1, stop))
    assert positions_between(spans, first, last).tolist() == whole[:, first:last].tolist()
    assert sequence(stop, *spans).position_shift == whole[0, -1] - (stop - 1)


@pytest.mark.parametrize("size", range(1, 12))
def test_chunks_of_a_prompt_have_the_positions_of_the_whole(size: int) -> None:
    made = sequence(20, picture(3, 2, 3), clip(11, 14), picture(15, 2, 2))
    whole = np.array(slow_positions(list(made.spans), 20)).T
    chunks = [planned(Row(made, start, min(start + size, 20))) for start in range(0, 20, size)]
    laid = np.concatenate([np.broadcast_to(chunk, (3, chunk.shape[1])) for chunk in chunks], axis=1)
    assert laid.tolist() == whole.tolist()


def test_a_decode_goes_on_from_the_last_position_on_one_axis() -> None:
    made = sequence(20, picture(3, 2, 3))
    made.append(5)
    assert planned(Row(made, 20, 21)).tolist() == [[17]]


def test_one_row_among_pictures_lays_out_all_axes_for_its_neighbours_too() -> None:
    text, seen = sequence(6), sequence(20, picture(3, 2, 3))
    assert planned(Row(text, 5, 6), Row(seen, 2, 5), Row(text, 0, 2)).tolist() == [
        [5, 2, 3, 3, 0, 1],
        [5, 2, 3, 3, 0, 1],
        [5, 2, 3, 4, 0, 1],
    ]


def test_without_grids_there_is_one_axis() -> None:
    made = sequence(12, clip(2, 8))
    assert planned(Row(made, 0, 12)).tolist() == [list(range(12))]


def test_equal_hashes_have_equal_positions_and_a_picture_of_another_shape_has_other_hashes() -> None:
    wide = MediaSpan(b"w" * 32, MediaKind.IMAGE, 4, 10, (2, 3))
    tall = MediaSpan(b"t" * 32, MediaKind.IMAGE, 4, 10, (3, 2))
    one, twin, other = sequence(40, wide), sequence(36, wide), sequence(40, tall)
    shared = sum(a == b for a, b in zip(one.extend_hashes(), twin.extend_hashes(), strict=False))
    assert shared == 2
    assert positions_between(one.spans, 0, 16 * shared).tolist() == positions_between(twin.spans, 0, 16 * shared).tolist()
    assert not set(one.extend_hashes()) & set(other.extend_hashes())
