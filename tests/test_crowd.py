"""Text and pictures keep apart: the more so the more pictures are refused, and never so that a replica starves."""

from __future__ import annotations

import random

import pytest
from kv_world import FakeMedia, sequence

from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.scheduler.crowd import Crowd, MediaHaste
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.placement import Candidate, place
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import Scheduler
from mmserve.scheduler.sequence import Sequence


def text(seq_id: int, **fields: object) -> Sequence:
    return sequence(seq_id, f"text {seq_id}", 300, **fields)


def picture(seq_id: int, **fields: object) -> Sequence:
    return sequence(seq_id, (f"picture {seq_id}", 576), 300, **fields)


class House:
    """Replicas at which those who are placed stay: as if answers had just begun when as many others have come."""

    def __init__(self, num_replicas: int, *, share_taken: float = 1.0) -> None:
        self.records = Records()
        for i in range(1000):
            self.records.haste.observe(is_taken=i % 100 < 100 * share_taken)
        limits = SchedulerLimits(8192, 128, 1024)
        self.replicas = [Scheduler(limits, KVCacheManager(1000, 16), FakeMedia().rows_of, self.records) for _ in range(num_replicas)]

    def add(self, each: Sequence) -> int:
        index = place([replica.candidate(each) for replica in self.replicas])
        self.replicas[index].add(each)
        return index


def test_one_replica_takes_everybody():
    house = House(1, share_taken=0.0)
    assert {house.add(text(i) if i % 2 else picture(i)) for i in range(20)} == {0}


@pytest.mark.parametrize("only", [text, picture])
@pytest.mark.parametrize("share_taken", [0.0, 1.0])
def test_requests_of_one_kind_spread_over_all_replicas(only: type[Sequence], share_taken: float):
    house = House(4, share_taken=share_taken)
    places = [house.add(only(i)) for i in range(40)]
    assert [places.count(replica) for replica in range(4)] == pytest.approx([10] * 4, abs=1)


def neighbours(num_pictures: int, num_texts: int, *, share_taken: float) -> float:
    """How many pictures are beside a text, if so many of each are here at once, coming and going in turn, with nothing to wait for."""
    rng, haste = random.Random(1), MediaHaste()
    for i in range(1000):
        haste.observe(is_taken=i % 100 < 100 * share_taken)
    crowds = [Crowd(haste) for _ in range(7)]
    here: list[tuple[Sequence, int]] = []
    for i in range(5 * (num_pictures + num_texts)):
        if i >= num_pictures + num_texts:
            gone, index = here.pop(0)
            crowds[index].leave(gone)
        is_picture = rng.random() * (num_pictures + num_texts) < num_pictures
        each, ms = (picture(i), rng.uniform(40, 80)) if is_picture else (text(i), rng.uniform(5, 35))
        index = place([Candidate(0.0, 0.0, crowd.harm_ms(each, ms)) for crowd in crowds])
        crowds[index].join(each, ms)
        here.append((each, index))
    homes = [index for each, index in here if not each.spans]
    return sum(bool(each.spans) for home in homes for each, index in here if index == home) / len(homes)


def test_in_a_surge_pictures_leave_text_its_replicas():
    """Each replica held both, and every step beside an answer was as long as the target allows: 35 ms instead of 20."""
    assert neighbours(300, 100, share_taken=0.2) < 2.0
    assert neighbours(300, 100, share_taken=1.0) > 5.0  # rather than waste what text leaves


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share_taken", [0.1, 1.0])
def test_no_replica_stays_empty_whoever_comes(seed: int, share_taken: float):
    rng, house = random.Random(seed), House(5, share_taken=share_taken)
    for i in range(100):
        house.add(text(i) if rng.random() < 0.5 else picture(i))
    held = [replica.num_waiting for replica in house.replicas]
    assert min(held) > 0
    assert max(held) < 60


@pytest.mark.parametrize("seed", range(10))
def test_what_somebody_would_add_is_what_the_sum_over_pairs_says(seed: int):
    rng, haste = random.Random(seed), MediaHaste()
    crowd, here = Crowd(haste), []
    for i in range(60):
        if here and rng.random() < 0.4:
            gone, _ = here.pop(rng.randrange(len(here)))
            crowd.leave(gone)
        each, ms = rng.choice([text, picture])(i), rng.uniform(1, 90)
        crowd.join(each, ms)
        here.append((each, ms))
        haste.observe(is_taken=rng.random() < 0.5)
    weight = {True: haste.value, False: 1.0}
    for new in (text(1000), picture(1001)):
        pairs = sum(50.0 * weight[bool(other.spans)] + ms * weight[bool(new.spans)] for other, ms in here)
        assert crowd.harm_ms(new, 50.0) == pytest.approx(0.5 * pairs)
    for each, _ in here:
        crowd.leave(each)
    assert crowd.harm_ms(text(1002), 50.0) == 0.0


def test_who_goes_before_a_newcomer_is_counted_in_the_order_of_the_queue():
    house = House(1)
    (replica,) = house.replicas
    for i in range(4):
        replica.add(text(i, tenant="modest", arrival_s=0.0))
        replica.add(picture(10 + i, tenant="modest", arrival_s=0.0))
    assert [replica.num_before(700, "modest", 0.0, has_media=kind) for kind in (False, True)] == [4, 0]
    assert [replica.num_before(4000, "modest", 0.0, has_media=kind) for kind in (False, True)] == [4, 4]
    replica.add(text(20, tenant="greedy", arrival_s=0.0))
    assert replica.num_before(700, "modest", 1.0, has_media=False) == 5
    house.records.usage.charge({"greedy": 1000.0})  # fifty seconds
    assert replica.num_before(700, "modest", 1.0, has_media=False) == 4
    assert replica.num_before(700, "greedy", 1.0, has_media=False) == 5


def test_who_left_is_not_minded_any_more():
    house = House(1)
    (replica,) = house.replicas
    each = picture(1)
    replica.add(each)
    assert replica.candidate(text(2)).harm_ms > 0
    replica.abort(1)
    assert replica.candidate(text(2)).harm_ms == 0.0
    replica.add(picture(3))
    replica.evacuate()
    assert replica.candidate(text(2)).harm_ms == 0.0
