"""The window is counted from the first item; a batch is never larger than it may be, and nothing is lost or overtaken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.encoders.micro_batcher import MicroBatcher


def test_a_batch_leaves_when_its_first_item_has_waited_the_window() -> None:
    batcher = MicroBatcher[str](0.012, 48)
    assert batcher.due_s is None
    batcher.add("a", 1.0)
    assert batcher.take(1.011) == []
    assert batcher.take(1.012) == ["a"]
    assert len(batcher) == 0


def test_a_later_item_does_not_restart_the_window() -> None:
    batcher = MicroBatcher[int](0.012, 48)
    for i in range(10):
        batcher.add(i, 1.0 + i * 0.0012)
    assert batcher.due_s == 1.012
    assert batcher.take(1.012) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_full_batch_leaves_at_once_and_the_rest_keeps_its_own_window() -> None:
    batcher = MicroBatcher[int](0.012, 3)
    for i in range(5):
        batcher.add(i, 1.0 + i / 1000)
    assert batcher.take(1.004) == [0, 1, 2]
    assert batcher.take(1.004) == []
    assert batcher.due_s == 1.003 + 0.012
    assert batcher.take(1.015) == [3, 4]


def test_items_put_back_go_first_and_at_once() -> None:
    batcher = MicroBatcher[str](0.012, 48)
    batcher.add("later", 1.0)
    batcher.put_back(["a", "b"], 1.0)
    assert batcher.take(1.0) == ["a", "b", "later"]


def test_a_removed_item_is_gone_and_only_once() -> None:
    batcher = MicroBatcher[str](0.0, 48)
    item = "a"
    batcher.add(item, 0.0)
    batcher.add("b", 0.0)
    assert batcher.remove(item)
    assert not batcher.remove(item)
    assert batcher.take(0.0) == ["b"]


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.003, 0.02]), st.booleans()), max_size=20), st.integers(1, 5))
def test_every_item_leaves_once_in_order_and_none_waits_beyond_its_window(steps: list[tuple[float, bool]], max_items: int) -> None:
    batcher = MicroBatcher[int](0.01, max_items)
    now_s, added, left = 0.0, {}, []
    for i, (pause_s, adds) in enumerate(steps):
        now_s += pause_s
        if adds:
            batcher.add(i, now_s)
            added[i] = now_s
        while batch := batcher.take(now_s):
            assert len(batch) <= max_items
            left += batch
        assert all(now_s - added[item] < 0.01 + 1e-9 for item in added if item not in left)
    left += batcher.take_all()
    assert left == sorted(added)
