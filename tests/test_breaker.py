"""When an encoder is asked no more, and when it is asked again.  Time is whatever the test says."""

from __future__ import annotations

import pytest

from mmserve.encoders.breaker import BreakerLimits, BreakerState, CircuitBreaker

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
LIMITS = BreakerLimits(
    max_faults=3, max_fault_share=0.5, min_outcomes=10, window_s=10.0, first_pause_s=1.0, longest_pause_s=8.0, num_probes=2
)


@pytest.fixture
def breaker() -> CircuitBreaker:
    return CircuitBreaker(LIMITS)


def probe(breaker: CircuitBreaker, now_s: float, *, good: bool) -> None:
    breaker.begin_probe(now_s)
    if good:
        breaker.note_good_probe(now_s)
    else:
        breaker.trip(now_s)


def close(breaker: CircuitBreaker, now_s: float) -> None:
    for _ in range(LIMITS.num_probes):
        probe(breaker, now_s, good=True)
    assert breaker.state is CLOSED


def test_two_faults_and_a_success_leave_it_closed(breaker: CircuitBreaker) -> None:
    breaker.note_fault(0.0)
    breaker.note_fault(0.0)
    breaker.note_success(0.0)
    breaker.note_fault(0.0)
    breaker.note_fault(0.0)
    assert breaker.state is CLOSED
    breaker.note_fault(0.0)
    assert breaker.state is OPEN


def test_every_other_one_a_fault_opens_it_once_there_are_enough_to_say_so(breaker: CircuitBreaker) -> None:
    for i in range(10):  # the tenth is a success
        (breaker.note_success if i % 2 else breaker.note_fault)(0.1 * i)
        assert breaker.state is CLOSED
    breaker.note_fault(1.0)
    assert breaker.state is OPEN


def test_old_faults_are_forgotten(breaker: CircuitBreaker) -> None:
    for i in range(40):
        (breaker.note_fault if i % 3 == 0 else breaker.note_success)(float(i))
    assert breaker.state is CLOSED
    assert len(breaker._outcomes) <= 11
    assert breaker._num_faults == sum(is_fault for _, is_fault in breaker._outcomes)


def test_it_is_half_open_after_its_pause_and_closes_after_enough_good_probes(breaker: CircuitBreaker) -> None:
    breaker.trip(100.0)
    assert breaker.retry_after_s(100.25) == 0.75
    with pytest.raises(AssertionError):
        breaker.begin_probe(100.5)
    probe(breaker, 101.0, good=True)
    assert breaker.state is HALF_OPEN
    probe(breaker, 101.1, good=True)
    assert breaker.state is CLOSED


def test_pauses_double_while_it_keeps_failing_up_to_the_longest(breaker: CircuitBreaker) -> None:
    now_s, pauses = 0.0, []
    breaker.trip(now_s)
    for _ in range(6):
        pauses.append(breaker.retry_after_s(now_s))
        now_s += pauses[-1]
        probe(breaker, now_s, good=False)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_relapse_soon_after_it_closed_goes_on_where_the_pauses_were(breaker: CircuitBreaker) -> None:
    breaker.trip(0.0)
    close(breaker, 1.0)
    breaker.trip(2.0)
    assert breaker.retry_after_s(2.0) == 2.0
    close(breaker, 4.0)
    breaker.trip(30.0)  # long well
    assert breaker.retry_after_s(30.0) == 1.0


def test_being_told_to_stay_away_opens_it_for_at_least_that_long(breaker: CircuitBreaker) -> None:
    breaker.note_fault(0.0, retry_after_s=25.0)
    assert breaker.state is OPEN
    assert breaker.retry_after_s(0.0) == 25.0
    breaker.note_fault(1.0, retry_after_s=5.0)  # of another request that was under way: not sooner
    assert breaker.retry_after_s(1.0) == 24.0
    breaker.note_fault(2.0, retry_after_s=100.0)
    assert breaker.retry_after_s(2.0) == 100.0


def test_what_was_under_way_when_it_opened_says_nothing(breaker: CircuitBreaker) -> None:
    breaker.trip(0.0)
    for _ in range(10):
        breaker.note_success(0.5)
        breaker.note_fault(0.5)
    assert breaker.retry_after_s(0.5) == 0.5
    breaker.begin_probe(1.0)
    breaker.note_fault(1.0)
    assert breaker.state is HALF_OPEN
    close(breaker, 1.0)


def test_a_good_probe_of_a_breaker_that_was_tripped_meanwhile_closes_nothing(breaker: CircuitBreaker) -> None:
    breaker.trip(0.0)
    breaker.begin_probe(1.0)
    breaker.trip(1.0)
    breaker.note_good_probe(1.0)
    breaker.note_good_probe(1.0)
    assert breaker.state is OPEN
