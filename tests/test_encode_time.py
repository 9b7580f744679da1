"""How long a batch may take before its encoder is taken for hung."""

from __future__ import annotations

import pytest

from mmserve.encoders.encode_time import GUESS_TIMEOUT_S, HUNG_S, SLOWER, EncodeTime
from mmserve.plan import EncodeItem
from mmserve.shared_buffer import BufferSlice


def batch(num_pictures: int, side: int = 336) -> list[EncodeItem]:
    return [EncodeItem(BufferSlice(0, (1, side, side, 3), "uint8"), BufferSlice(0, (576, 64), "float32"))] * num_pictures


def test_a_batch_larger_than_any_before_gets_a_generous_guess() -> None:
    time = EncodeTime()
    assert time.timeout_s(batch(1)) == GUESS_TIMEOUT_S
    time.note(batch(1), 0.1)
    assert time.timeout_s(batch(48)) == GUESS_TIMEOUT_S


def test_a_batch_may_take_a_few_seconds_beyond_what_its_size_has_taken() -> None:
    time = EncodeTime()
    time.note(batch(1), 0.02)
    time.note(batch(48), 0.3)
    assert time.timeout_s(batch(1)) == pytest.approx(HUNG_S + SLOWER * 0.02)
    assert time.timeout_s(batch(48)) == pytest.approx(HUNG_S + SLOWER * 0.3)
    assert time.timeout_s(batch(10)) == pytest.approx(HUNG_S + SLOWER * 0.3)  # never seen, but smaller than one that was
    assert HUNG_S <= 5.0


def test_the_slowest_of_a_size_is_what_counts_and_fades() -> None:
    time = EncodeTime()
    for seconds in [0.1, 2.0, 0.1]:
        time.note(batch(4), seconds)
    assert time.timeout_s(batch(4)) > HUNG_S + SLOWER * 1.5
    for _ in range(100):
        time.note(batch(4), 0.1)
    assert time.timeout_s(batch(4)) == pytest.approx(HUNG_S + SLOWER * 0.1, rel=0.01)


def test_a_large_picture_is_not_a_small_one() -> None:
    """A tower that takes any size takes a hundred times as long for one that has a hundred times the pixels."""
    time = EncodeTime()
    time.note(batch(1, side=56), 0.05)
    assert time.timeout_s(batch(1, side=1120)) == GUESS_TIMEOUT_S
