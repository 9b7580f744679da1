"""A share that rises beyond chance is told, once; a steady one, a falling one and a young one aren't."""

from __future__ import annotations

import math
import random

import pytest

from mmserve.rate_watch import RateAlarm, RateWatch
from mmserve.recent_answers import UNKNOWN, Answered, RecentAnswers


def run(watch: RateWatch, rng: random.Random, share: float, *, start_s: float, num_trials: int, every_s: float) -> list[RateAlarm]:
    alarms = [watch.note(rng.random() < share, start_s + i * every_s) for i in range(num_trials)]
    return [alarm for alarm in alarms if alarm is not None]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_a_steady_share_raises_no_alarm_in_two_days(seed: int, share: float) -> None:
    assert run(RateWatch(), random.Random(seed), share, start_s=0.0, num_trials=8000, every_s=21.6) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_share_that_quadruples_is_told_within_half_an_hour_and_not_all_the_time(seed: int) -> None:
    watch, rng = RateWatch(), random.Random(seed)
    assert run(watch, rng, 0.1, start_s=0.0, num_trials=2000, every_s=10.0) == []
    alarms = run(watch, rng, 0.4, start_s=20_000.0, num_trials=360, every_s=10.0)
    assert 1 <= len(alarms) <= 3
    assert alarms[0].past_share == pytest.approx(0.1, abs=0.03)
    assert alarms[0].num_hits / alarms[0].num_trials > 0.2


def test_a_falling_share_is_good_news() -> None:
    watch, rng = RateWatch(), random.Random(0)
    run(watch, rng, 0.5, start_s=0.0, num_trials=2000, every_s=10.0)
    assert run(watch, rng, 0.0, start_s=20_000.0, num_trials=500, every_s=10.0) == []


def test_nothing_is_said_before_there_is_a_past() -> None:
    watch = RateWatch(least_past=200)
    assert [watch.note(True, i * 1.0) for i in range(800)] == [None] * 800


def test_after_a_past_without_a_single_one_the_first_few_are_no_alarm() -> None:
    watch = RateWatch()
    assert [watch.note(False, 10.0 * i) for i in range(500)] == [None] * 500
    assert [watch.note(True, 5000.0 + i) for i in range(3)] == [None] * 3
    assert any(watch.note(True, 5003.0 + i) for i in range(20))


def test_what_was_becomes_the_past_and_the_new_share_is_soon_the_usual_one() -> None:
    watch, rng = RateWatch(past_s=3600.0), random.Random(3)
    run(watch, rng, 0.05, start_s=0.0, num_trials=1000, every_s=5.0)
    assert run(watch, rng, 0.5, start_s=5_000.0, num_trials=150, every_s=5.0)
    run(watch, rng, 0.5, start_s=5_750.0, num_trials=1000, every_s=5.0)
    assert run(watch, rng, 0.5, start_s=10_750.0, num_trials=500, every_s=5.0) == []


def test_the_bound_is_above_the_binomial_tail() -> None:
    """An alarm that Chernoff's bound allows, the exact tail allows, too."""
    for n, p in ((20, 0.05), (50, 0.3), (400, 0.01)):
        for k in range(math.ceil(n * p) + 1, n + 1):
            tail = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
            seen = k / n
            bound = math.exp(-n * (seen * math.log(seen / p) + ((1 - seen) * math.log((1 - seen) / (1 - p)) if k < n else 0)))
            assert tail <= bound * (1 + 1e-9)


# --- recent answers ----------------------------------------------------------------------------------------------------------


def test_the_same_question_within_minutes_is_a_repeat() -> None:
    recent = RecentAnswers(repeat_s=300.0)
    assert not recent.is_repeat(b"q", 0.0)
    recent.note("a", b"q", Answered("acme", "image"), 10.0)
    assert recent.is_repeat(b"q", 310.0)
    assert not recent.is_repeat(b"other", 310.0)
    assert not recent.is_repeat(b"q", 310.1)


def test_each_answer_is_rated_once_by_its_own_tenant() -> None:
    recent = RecentAnswers()
    recent.note("a", b"q", Answered("acme", "image_audio"), 0.0)
    assert recent.rate("a", "other") == UNKNOWN
    assert recent.rate("b", "acme") == UNKNOWN
    assert recent.rate("a", "acme") == "image_audio"
    assert recent.rate("a", "acme") is None


def test_only_so_many_answers_are_remembered_the_newest() -> None:
    recent = RecentAnswers(max_answers=3)
    for i in range(10):
        recent.note(str(i), str(i % 5).encode(), Answered("acme", "text"), float(i))
    assert len(recent) == 3
    assert [recent.rate(str(i), "acme") for i in range(5, 10)] == [UNKNOWN, UNKNOWN, "text", "text", "text"]
    assert [recent.is_repeat(str(i).encode(), 10.0) for i in range(5)] == [False, False, True, True, True]
