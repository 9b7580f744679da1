"""Quotas against a slow and obvious oracle: whatever happens, in whatever order, nobody gets more than a minute's tokens in a minute."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.errors import RateLimited, TooLarge
from mmserve.quota import SLOT_S, WINDOW_S, Quota, QuotaBooks, Reservation

START_S = 12_345.678


class Desk:
    """One tenant with a quota that can be changed, and a clock that is moved by hand."""

    def __init__(self, tokens_per_minute: int = 0, concurrent_requests: int = 0) -> None:
        self.quota = Quota(tokens_per_minute, concurrent_requests)
        self.now_s = START_S
        self.books = QuotaBooks(self._quota_of)

    def _quota_of(self, tenant: str) -> Quota | None:
        return self.quota if tenant == "acme" else None

    def reserve(self, num_prompt: int, num_answer: int = 1, **fields: object) -> Reservation:
        return self.books.reserve("acme", num_prompt=num_prompt, num_answer=num_answer, now_s=self.now_s, **fields)  # type: ignore[arg-type]

    def settle(self, reservation: Reservation, num_used: int) -> None:
        self.books.settle(reservation, num_used, self.now_s)
        self.books.check()

    def refused(self, num_prompt: int, num_answer: int = 1) -> RateLimited:
        with pytest.raises(RateLimited) as caught:
            self.reserve(num_prompt, num_answer)
        return caught.value


def test_requests_at_a_time_are_counted_from_admission_to_end() -> None:
    desk = Desk(concurrent_requests=2)
    first, _ = desk.reserve(10), desk.reserve(10)
    assert desk.refused(10).message == "2 requests with this key are running, of at most 2"
    desk.settle(first, 11)
    desk.reserve(10)
    assert desk.refused(10).retry_after_s == 1


def test_a_reservation_counts_whole_until_the_end_says_what_was_used() -> None:
    desk = Desk(tokens_per_minute=100)
    first = desk.reserve(20, 60)
    refusal = desk.refused(15, 6)
    assert refusal.message == ("80 of 100 tokens a minute are used or reserved, and 21 were requested (15 in the prompt, 6 for the answer)")
    assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
    desk.settle(first, 25)
    desk.settle(desk.reserve(15, 60), 75)
    desk.refused(1)


def test_what_was_used_comes_back_a_minute_after_the_end_and_not_before() -> None:
    desk = Desk(tokens_per_minute=100)
    running = desk.reserve(10, 90)
    desk.now_s += 45  # a long answer still counts when it ends, however early it began
    desk.settle(running, 100)
    desk.now_s += WINDOW_S - 0.001
    refusal = desk.refused(1)
    assert refusal.retry_after_s is not None
    assert 0 < refusal.retry_after_s <= 0.001 + SLOT_S
    desk.now_s += refusal.retry_after_s
    desk.reserve(10, 90)


def test_who_is_refused_is_told_when_exactly_enough_will_be_free() -> None:
    desk = Desk(tokens_per_minute=100)
    desk.settle(desk.reserve(30), 31)
    desk.now_s += 20
    desk.settle(desk.reserve(30), 31)
    desk.now_s += 20
    running = desk.reserve(30, 8)  # all 100
    for num_tokens, least_s in ((31, 20), (32, 40), (62, 40)):
        wait_s = desk.refused(num_tokens - 1).retry_after_s
        assert wait_s is not None
        assert least_s <= wait_s <= least_s + SLOT_S
    assert desk.refused(62).retry_after_s == 1  # that is up to the one who runs
    desk.settle(running, 0)


def test_settling_twice_gives_nothing_back_twice() -> None:
    desk = Desk(tokens_per_minute=100, concurrent_requests=1)
    first = desk.reserve(10)
    desk.settle(first, 11)
    second = desk.reserve(10)
    desk.settle(first, 0)
    desk.refused(10)
    desk.settle(second, 0)


@pytest.mark.parametrize(
    ("num_prompt", "num_answer", "num_choices", "param"), [(90, 11, 1, "max_tokens"), (100, 1, 1, "messages"), (10, 31, 3, "max_tokens")]
)
def test_more_than_a_whole_minute_has_is_refused_for_good_with_both_numbers(
    num_prompt: int, num_answer: int, num_choices: int, param: str
) -> None:
    """As a 429 it would be tried again for ever."""
    desk = Desk(tokens_per_minute=100)
    with pytest.raises(TooLarge) as caught:
        desk.reserve(num_prompt, num_answer, num_choices=num_choices)
    num_tokens = num_prompt + num_choices * num_answer
    assert caught.value.message == (
        f"this key may use 100 tokens a minute, but {num_tokens} were requested "
        f"({num_prompt} in the prompt, {num_choices * num_answer} for the answer)"
    )
    assert (caught.value.param, caught.value.retry_after_s) == (param, None)
    desk.books.check()


def test_an_answer_without_a_length_of_its_own_gets_what_a_minute_has() -> None:
    desk = Desk(tokens_per_minute=100)
    first = desk.reserve(10, 4000, may_shorten=True)
    assert (first.num_answer, first.num_tokens) == (90, 100)
    desk.settle(first, 0)
    two = desk.reserve(11, 4000, num_choices=2, may_shorten=True)
    assert (two.num_answer, two.num_tokens) == (44, 99)
    desk.settle(two, 0)
    assert desk.reserve(10, 5, may_shorten=True).num_answer == 5
    with pytest.raises(TooLarge):
        desk.reserve(100, 4000, may_shorten=True)


def test_room_is_missing_when_no_request_at_all_would_be_taken() -> None:
    desk = Desk(tokens_per_minute=100, concurrent_requests=2)
    desk.books.check_room("acme", desk.now_s)
    first = desk.reserve(10, 90)
    with pytest.raises(RateLimited, match=r"^all 100 tokens a minute are used or reserved$"):
        desk.books.check_room("acme", desk.now_s)
    desk.settle(first, 0)
    first, second = desk.reserve(10), desk.reserve(10)
    with pytest.raises(RateLimited, match=r"^2 requests with this key are running, of at most 2$"):
        desk.books.check_room("acme", desk.now_s)
    desk.settle(first, 0)
    desk.books.check_room("acme", desk.now_s)
    desk.settle(second, 0)


def test_a_quota_that_is_lowered_takes_nothing_away_and_lets_nobody_in_above_it() -> None:
    desk = Desk(concurrent_requests=3)
    running = [desk.reserve(10) for _ in range(3)]
    desk.quota = Quota(concurrent_requests=2)
    desk.settle(running.pop(), 11)
    desk.refused(10)
    desk.settle(running.pop(), 11)
    desk.reserve(10)
    desk.quota = Quota(tokens_per_minute=1000)
    desk.reserve(10)
    standing = desk.books.standing("acme", desk.now_s)
    assert standing is not None
    assert standing.remaining_tokens == 1000 - 5 * 11  # they were counted before they were limited


def test_who_has_no_quota_is_not_in_the_books() -> None:
    desk = Desk()
    reservation = desk.books.reserve("stranger", num_prompt=10, num_answer=7, now_s=desk.now_s)
    assert reservation.num_answer == 7
    desk.books.check_room("stranger", desk.now_s)
    desk.books.settle(reservation, 17, desk.now_s)
    assert desk.books.standing("stranger", desk.now_s) is None
    assert not desk.books._books


def test_standing_says_what_is_left_and_when_all_of_it_will_be() -> None:
    desk = Desk(tokens_per_minute=100, concurrent_requests=1)
    standing = desk.books.standing("acme", desk.now_s)
    assert standing is not None
    assert (standing.remaining_requests, standing.remaining_tokens, standing.requests_reset_s, standing.tokens_reset_s) == (1, 100, 0, 0)
    running = desk.reserve(30, 20)
    standing = desk.books.standing("acme", desk.now_s)
    assert standing is not None
    assert (standing.remaining_requests, standing.remaining_tokens, standing.requests_reset_s) == (0, 50, 1)
    assert standing.tokens_reset_s >= WINDOW_S
    desk.settle(running, 40)
    desk.now_s += 10
    standing = desk.books.standing("acme", desk.now_s)
    assert standing is not None
    assert (standing.remaining_requests, standing.remaining_tokens) == (1, 60)
    assert 50 <= standing.tokens_reset_s <= 50 + SLOT_S


def test_a_book_stays_short_however_many_requests_end() -> None:
    desk = Desk(tokens_per_minute=10**9)
    for _ in range(20_000):
        desk.now_s += 0.01
        desk.settle(desk.reserve(5), 6)
    assert len(desk.books._books["acme"]._ended) <= WINDOW_S / SLOT_S + 2
    desk.now_s += 2 * WINDOW_S
    desk.settle(desk.reserve(5), 0)
    assert len(desk.books._books["acme"]._ended) == 0


Step = tuple[str, int, int, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "settle", "wait", "quota"]),
        st.integers(1, 60),
        st.integers(1, 60),
        st.floats(0, 70, allow_nan=False),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS, st.integers(2, 150), st.integers(1, 4))
def test_no_minute_ever_holds_more_than_the_quota(steps: list[Step], tokens_per_minute: int, concurrent_requests: int) -> None:
    """Whatever touched any 60 s, whole, is within what was the largest quota by then; and who waits as long as he was told gets in."""
    desk = Desk(tokens_per_minute, concurrent_requests)
    largest = tokens_per_minute
    open_ones: list[tuple[float, Reservation]] = []
    lives: list[tuple[float, float, int]] = []  # start, end, tokens used
    for what, first, second, number in steps:
        match what:
            case "reserve":
                refusal = None
                try:
                    reservation = desk.reserve(first, second)
                except TooLarge:
                    assert first + second > desk.quota.tokens_per_minute
                    continue
                except RateLimited as error:
                    refusal = error
                if refusal is not None:
                    wait_s = refusal.retry_after_s
                    assert wait_s is not None
                    assert 0 < wait_s <= WINDOW_S + SLOT_S
                    if open_ones:
                        continue
                    desk.now_s += wait_s
                    reservation = desk.reserve(first, second)
                open_ones.append((desk.now_s, reservation))
                assert len(open_ones) <= desk.quota.concurrent_requests
            case "settle" if open_ones:
                start_s, reservation = open_ones.pop(first % len(open_ones))
                num_used = min(second, reservation.num_tokens)
                desk.settle(reservation, num_used)
                lives.append((start_s, desk.now_s, num_used))
            case "wait":
                desk.now_s += number
            case "quota":
                desk.quota = Quota(max(2, first + second), 1 + first % 4)
                largest = max(largest, desk.quota.tokens_per_minute)
        desk.books.check()
    lives += [(start_s, desk.now_s, reservation.num_tokens) for start_s, reservation in open_ones]
    for stop_s in [end_s for _, end_s, _ in lives] + [start_s for start_s, _, _ in lives]:
        touching = [num_used for start_s, end_s, num_used in lives if start_s <= stop_s and end_s > stop_s - WINDOW_S]
        assert sum(touching) <= largest
