"""Nobody waits for ever: small before large, but only so long; tenants side by side, whoever floods; all in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from kv_world import FakeMedia, media_key, sequence
from scheduler_desk import stopwatch

from mmserve.paged_kv.kv_cache_manager import KVCacheManager
from mmserve.scheduler.cost_model import PRIOR, Coefficients
from mmserve.scheduler.fairness import FairQueue, TenantUsage
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.policy import MAX_OVERTAKEN_S, waiting_key
from mmserve.scheduler.records import Records
from mmserve.scheduler.scheduler import Scheduler
from mmserve.scheduler.sequence import Sequence

SLOW_CPU = Coefficients(step=30.0, row=0.8, token=1.9, pair=1e-4, context=2e-3)


class Shop:
    """A replica in virtual time: a step takes what `true` says, and arrivals are let in between steps."""

    def __init__(self, true: Coefficients, *, max_num_seqs: int = 16) -> None:
        self.true = true
        self.media = FakeMedia()
        self.records = Records()
        limits = SchedulerLimits(8192, max_num_seqs, max_num_batched_tokens=512, tpot_target_ms=35.0)
        self.scheduler = Scheduler(limits, KVCacheManager(4000, 16), self.media.rows_of, self.records)
        self.now_s = 0.0

    def run(self, until_s: float, arrivals: Callable[[float], list[Sequence]]) -> None:
        """`arrivals(now_s)` gives those who have come since it was last asked."""
        while self.now_s < until_s:
            for each in arrivals(self.now_s):
                self.scheduler.add(each)
            plan = self.scheduler.schedule(self.now_s)
            if plan is None:
                self.now_s += 0.01
                continue
            result = stopwatch(plan, self.true)
            self.now_s += result.seconds
            self.scheduler.apply(result, self.now_s)


class Stream:
    """Requests of `num_tokens` at a steady rate, no two alike."""

    def __init__(self, first_id: int, tenant: str, per_s: float, num_tokens: int, start_s: float = 0.0) -> None:
        self.sequences: list[Sequence] = []
        self.first_id, self.tenant, self.per_s, self.num_tokens, self.start_s = first_id, tenant, per_s, num_tokens, start_s

    def until(self, now_s: float) -> list[Sequence]:
        new = []
        while (arrival_s := self.start_s + len(self.sequences) / self.per_s) <= now_s:
            number = self.first_id + len(self.sequences)
            new.append(sequence(number, f"{self.tenant} {number} ", self.num_tokens, tenant=self.tenant, arrival_s=arrival_s))
            self.sequences.append(new[-1])
        return new

    def waits_s(self) -> list[float]:
        """Of those who have begun, how long it took."""
        return [each.first_step_s - each.arrival_s for each in self.sequences if each.first_step_s is not None]


@pytest.mark.parametrize(
    ("true", "per_s", "num_tokens"),
    [(PRIOR, 25.0, 400), (SLOW_CPU, 3.0, 200)],  # each more than the box can do
)
@pytest.mark.parametrize("tenant", ["small", "pictures"])
def test_six_pictures_under_endless_small_requests_start_within_thirty_seconds(
    true: Coefficients, per_s: float, num_tokens: int, tenant: str
):
    shop, small = Shop(true), Stream(1, "small", per_s, num_tokens)
    pictures = [(f"picture {i}", 576) for i in range(6)]
    for name, num_rows in pictures:
        shop.media.encode(media_key(name), num_rows)
    large = sequence(0, "six", *pictures, 20, tenant=tenant, arrival_s=2.0)
    late = [large]

    def arrivals(now_s: float) -> list[Sequence]:
        return [*small.until(now_s), *([late.pop()] if late and now_s >= large.arrival_s else [])]

    shop.run(32.0, arrivals)
    assert large.first_step_s is not None
    assert large.first_step_s - large.arrival_s < 30.0
    assert shop.scheduler.num_waiting > 5, "the small ones were not endless"


def test_small_requests_do_not_wait_for_a_large_one_that_came_just_before():
    shop = Shop(PRIOR, max_num_seqs=1)
    first, large, small = sequence(0, "first", 40), sequence(1, "large", 3000), sequence(2, "small", 20)
    for each in (first, large, small):
        each.arrival_s = each.seq_id / 10
    shop.run(3.0, lambda now_s: [first, large, small] if now_s == 0 else [])
    assert small.first_step_s is not None
    assert large.first_step_s is not None
    assert small.first_step_s < large.first_step_s


def test_a_flood_of_one_tenant_does_not_drown_another():
    shop = Shop(PRIOR)
    flood, trickle = Stream(1000, "flood", 60.0, 600), Stream(0, "trickle", 1.0, 300)
    shop.run(20.0, lambda now_s: [*flood.until(now_s), *trickle.until(now_s)])
    assert shop.scheduler.num_waiting > 300
    assert len(trickle.waits_s()) == len(trickle.sequences)
    assert max(trickle.waits_s()) < 1.5
    assert max(flood.waits_s()) > 5.0


def test_tenants_who_both_want_more_than_there_is_get_about_the_same_time_on_the_device():
    shop = Shop(PRIOR)
    few_large, many_small = Stream(0, "few large", 8.0, 2000), Stream(1000, "many small", 80.0, 200)
    shop.run(30.0, lambda now_s: [*few_large.until(now_s), *many_small.until(now_s)])
    usage = shop.records.usage
    assert abs(usage.excess_ms("few large") - usage.excess_ms("many small")) < 1000.0  # of 30,000


def test_who_comes_late_is_not_owed_the_time_before_he_came():
    shop = Shop(PRIOR)
    old, new = Stream(0, "old", 40.0, 500), Stream(1000, "new", 40.0, 500, start_s=10.0)
    shop.run(10.0, old.until)
    num_begun = len(old.waits_s())
    shop.run(15.0, lambda now_s: [*old.until(now_s), *new.until(now_s)])
    assert len(old.waits_s()) - num_begun == pytest.approx(len(new.waits_s()), rel=0.5)


def test_a_tenant_back_from_a_pause_starts_level_with_those_who_stayed():
    usage = TenantUsage()
    usage.join("stays")
    usage.join("goes")
    usage.charge({"stays": 10.0, "goes": 50.0})
    assert (usage.excess_ms("stays"), usage.excess_ms("goes")) == (0.0, 40.0)
    usage.leave("goes")
    usage.charge({"stays": 20.0, "goes": 5.0})  # the step he was in landed after he had gone
    usage.join("goes")
    assert usage.excess_ms("goes") == 25.0  # what he used is remembered as long as it is more
    usage.leave("goes")
    usage.charge({"stays": 500.0})
    usage.join("goes")
    usage.join("new")
    assert [usage.excess_ms(tenant) for tenant in ("stays", "goes", "new")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_counters_stay_in_order_whoever_comes_and_goes(seed: int):
    rng, usage = random.Random(seed), TenantUsage()
    here: list[str] = []
    for _ in range(300):
        tenant = rng.choice("abcdef")
        if rng.random() < 0.4:
            here.append(tenant)
            usage.join(tenant)
        elif tenant in here:
            here.remove(tenant)
            usage.leave(tenant)
        usage.charge({rng.choice("abcdef"): rng.uniform(0, 9) for _ in range(2)})
        excesses = [usage.excess_ms(each) for each in here]
        assert not excesses or min(excesses) == 0.0


def test_a_queue_is_read_in_the_order_of_now_while_it_changes():
    usage = TenantUsage()
    queue = FairQueue(usage)
    crowd = [sequence(i, 5, tenant="ab"[i % 2], arrival_s=float(i)) for i in range(6)]
    for each in crowd:
        usage.join(each.tenant)
        queue.add(each, waiting_key(each, 0.0))
    assert [each.seq_id for each in queue] == [0, 1, 2, 3, 4, 5]
    usage.charge({"a": 60.0})  # worth three seconds
    read = []
    for each in queue:
        queue.remove(each)
        read.append(each.seq_id)
    assert read == [1, 0, 3, 2, 5, 4]
    assert len(queue) == 0


def test_priority_goes_before_fairness():
    usage = TenantUsage()
    queue = FairQueue(usage)
    greedy_but_urgent, modest = sequence(1, 5, tenant="a", priority=-1), sequence(2, 5, tenant="b")
    for each in (greedy_but_urgent, modest):
        usage.join(each.tenant)
        queue.add(each, waiting_key(each, 0.0))
    usage.charge({"a": 1e6})
    assert list(queue) == [greedy_but_urgent, modest]


def test_however_slow_the_device_nobody_is_overtaken_for_long():
    assert waiting_key(sequence(1, 5, arrival_s=1.0), 1e9) < waiting_key(sequence(2, 5, arrival_s=1.1 + MAX_OVERTAKEN_S), 0.0)
