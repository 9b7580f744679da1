"""Honest traffic never raises the alarm, whatever repeats, expires, is forgotten or restarts; rows under a foreign name do at once."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.hit_watch import HitAlarm, HitWatch


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Cache:
    """As honest as its key function.  `memory` is lost in a restart, `disk` isn't."""

    def __init__(self, key_of: Callable[[bytes], bytes], **watch: int) -> None:
        self.key_of = key_of
        self.memory: set[bytes] = set()
        self.disk: set[bytes] = set()
        self.watch = HitWatch(0, **watch)  # type: ignore[arg-type]
        self.settings = watch
        self.now_s = 0.0
        self.alarms: list[HitAlarm] = []
        self.num_requests = 0

    def request(self, content: bytes) -> None:
        self.now_s += 0.1
        self.num_requests += 1
        key = self.key_of(content)
        flags = [self.watch.asked(key, digest(content), self.now_s)]
        if key in self.memory or key in self.disk:
            flags.append(self.watch.hit(key, self.now_s))
        self.memory.add(key)
        self.disk.add(key)
        if any(flags) and (alarm := self.watch.alarm(self.now_s)):
            self.alarms.append(alarm)

    def restart(self) -> None:
        self.memory.clear()
        self.watch = HitWatch(len(self.disk), **self.settings)  # type: ignore[arg-type]


@given(
    steps=st.lists(st.one_of(st.integers(0, 12), st.sampled_from(["restart", "forget memory", "forget disk"])), max_size=200),
    max_windows=st.integers(1, 6),
)
def test_no_order_of_repeats_restarts_and_evictions_raises_the_alarm(steps: list[int | str], max_windows: int) -> None:
    cache = Cache(digest, max_windows=max_windows)
    for step in steps:
        if isinstance(step, int):
            cache.request(b"%d" % step)
        elif step == "restart":
            cache.restart()
        else:
            tier = cache.memory if step == "forget memory" else cache.disk
            tier.difference_update(sorted(tier)[::2])
    assert not cache.alarms


@pytest.mark.parametrize("exponent", [1.01, 1.5, 3.0])
def test_traffic_of_which_almost_all_repeats_raises_no_alarm(exponent: float) -> None:
    cache = Cache(digest, max_windows=500)
    for number in np.random.default_rng(7).zipf(exponent, 20_000):
        cache.request(b"%d" % number)
    assert not cache.alarms


def poisoned(content: bytes) -> bytes:
    """A key that overlooks all but the beginning of a picture: seventeen others pass for each."""
    return digest(b"%d" % (int(content) % 60))


@pytest.mark.parametrize("num_inherited", [0, 60])
def test_a_key_that_overlooks_part_of_the_content_is_found_within_some_hundred_requests(num_inherited: int) -> None:
    """Also when every wrong entry was made by an earlier life: what it left excuses one hit each, not one for every stranger."""
    draw = random.Random(3)
    cache = Cache(poisoned)
    cache.disk = {poisoned(b"%d" % number) for number in range(num_inherited)}
    cache.restart()
    while not cache.alarms:
        cache.request(b"%d" % draw.randrange(1000))
        assert cache.num_requests < 300
    (alarm,) = cache.alarms
    assert 0 < alarm.num_unexplained <= alarm.num_lookups <= cache.num_requests


def test_entries_that_nobody_made_are_found_by_the_first_that_is_hit_beyond_those_inherited() -> None:
    cache = Cache(digest)
    cache.request(b"honest")
    cache.disk.update(digest(b"%d" % number) for number in range(10))  # planted while we run
    cache.request(b"honest")
    assert not cache.alarms
    cache.request(b"3")
    assert cache.alarms == [HitAlarm(300.0, num_lookups=3, num_hits=2, num_unexplained=1)]


def test_the_person_on_call_is_told_once_a_minute_and_no_more_when_it_is_over() -> None:
    cache = Cache(lambda content: b"one key for all")
    for number in range(1, 1801):  # three minutes
        cache.request(b"%d" % number)
    assert len(cache.alarms) == 3
    assert cache.watch.alarm(cache.now_s + 301.0) is None


def test_where_nobody_knows_what_was_inherited_only_shared_keys_count() -> None:
    watch = HitWatch(None)
    assert not watch.asked(b"k", b"content", 0.0)
    assert not watch.hit(b"k", 0.0)
    assert watch.asked(b"k", b"another", 1.0)
    assert watch.hit(b"k", 1.0)
