"""What is refused at the door, with which error and which numbers; and where what is taken goes."""

from __future__ import annotations

import contextlib

import pytest

from mmserve.errors import BadRequest, ContextLengthExceeded, MmserveError, Overloaded, TooLarge
from mmserve.scheduler.admission import Admission, QueueLimits
from mmserve.scheduler.crowd import MEDIA_HASTE, MIN_MEDIA_HASTE
from mmserve.scheduler.drain_rate import DrainRate
from mmserve.scheduler.placement import Candidate, place
from mmserve.scheduler.records import Records

ROOMY = Admission(100, num_blocks=20, block_size=16, queue=QueueLimits(10), records=Records())
TIGHT = Admission(1000, num_blocks=4, block_size=16, queue=QueueLimits(10), records=Records())


def ask(
    door: Admission,
    num_prompt: int,
    max_tokens: int | None,
    num_sequences: int,
    tenant: str,
    num_queued: int,
    now_s: float,
    num_before: int | None = None,
    has_media: bool = True,
) -> int:
    """Everybody in the queue goes before it, unless told otherwise."""
    num_before = num_queued if num_before is None else num_before
    return door.check(num_prompt, max_tokens, num_sequences, tenant, num_queued, now_s, num_before=num_before, has_media=has_media)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "max_total_tokens"),
    [(1, 1, 2), (60, 40, 100), (60, None, 100), (99, None, 100), (99, 1, 100)],
)
def test_a_request_may_grow_as_long_as_it_asked_for_or_as_there_is_room(num_prompt: int, max_tokens: int | None, max_total_tokens: int):
    assert ask(ROOMY, num_prompt, max_tokens, num_sequences=1, tenant="a", num_queued=0, now_s=1000.0) == max_total_tokens


def test_without_max_tokens_an_answer_ends_where_the_cache_does():
    assert ask(TIGHT, 20, None, num_sequences=1, tenant="a", num_queued=0, now_s=1000.0) == 64


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "message"),
    [
        (60, 41, "max_tokens", "the context length is 100 tokens, but 101 were requested (60 in the prompt, 41 for the answer)"),
        (100, None, "messages", "the context length is 100 tokens, but 101 were requested (100 in the prompt, 1 for the answer)"),
        (5000, 1, "messages", "the context length is 100 tokens, but 5001 were requested (5000 in the prompt, 1 for the answer)"),
    ],
)
def test_beyond_the_context_length_is_refused_with_both_numbers(num_prompt: int, max_tokens: int | None, param: str, message: str):
    with pytest.raises(ContextLengthExceeded) as caught:
        ask(ROOMY, num_prompt, max_tokens, num_sequences=1, tenant="a", num_queued=0, now_s=1000.0)
    assert (caught.value.message, caught.value.param, caught.value.status) == (message, param, 400)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "message"),
    [
        (60, 5, "max_tokens", "the KV cache holds 64 tokens, but 65 were requested (60 in the prompt, 5 for the answer)"),
        (64, None, "messages", "the KV cache holds 64 tokens, but 65 were requested (64 in the prompt, 1 for the answer)"),
    ],
)
def test_what_could_never_fit_the_cache_is_refused_at_once(num_prompt: int, max_tokens: int | None, param: str, message: str):
    with pytest.raises(TooLarge) as caught:
        ask(TIGHT, num_prompt, max_tokens, num_sequences=1, tenant="a", num_queued=0, now_s=1000.0)
    assert (caught.value.message, caught.value.param, caught.value.status) == (message, param, 413)


def test_a_full_queue_is_overloaded_and_every_choice_counts():
    ask(ROOMY, 10, 10, num_sequences=1, tenant="a", num_queued=9, now_s=1000.0)
    ask(ROOMY, 10, 10, num_sequences=10, tenant="a", num_queued=0, now_s=1000.0)
    for num_sequences, num_queued in [(1, 10), (2, 9), (11, 0)]:
        with pytest.raises(Overloaded) as caught:
            ask(ROOMY, 10, 10, num_sequences, "a", num_queued, now_s=1000.0)
        assert caught.value.status == 503
        assert caught.value.retry_after_s == 60.0  # nobody was seen to begin


def test_a_queue_is_too_long_when_it_would_take_too_long():
    """512 places were five seconds of waiting on an eight-card box: every answer came, and each too late."""
    door = Admission(100, num_blocks=20, block_size=16, queue=QueueLimits(512, max_wait_s=0.5), records=busy())
    ask(door, 10, 10, num_sequences=1, tenant="a", num_queued=24, now_s=1100.0)
    with pytest.raises(Overloaded, match=r"it would take 0.5 s to begin, with 26 before it in the queue; 0.5 s are the limit") as caught:
        ask(door, 10, 10, num_sequences=1, tenant="a", num_queued=26, now_s=1100.0)
    assert caught.value.retry_after_s == 1.0


def test_who_used_more_than_others_is_refused_before_them():
    """Whoever comes later would go first: his requests were let in and answered seconds too late."""
    records = busy()
    records.usage.join("modest")
    records.usage.join("greedy")
    records.usage.charge({"greedy": 100.0})  # five seconds at the rate at which that is forgiven
    door = Admission(100, num_blocks=20, block_size=16, queue=QueueLimits(512, max_wait_s=0.5), records=records)
    ask(door, 10, 10, 1, "modest", num_queued=15, now_s=1100.0)
    with pytest.raises(Overloaded, match=r"it would take 5.3 s to begin, with 15 before it"):
        ask(door, 10, 10, 1, "greedy", num_queued=15, now_s=1100.0)
    ask(door, 10, 10, 1, "greedy", num_queued=0, now_s=1125.0)  # nobody waits, and seldom did


@pytest.mark.parametrize("has_media", [False, True])
def test_each_kind_waits_only_for_those_of_its_own_who_go_before_it(has_media: bool):
    """In a surge of pictures two thirds of the text were refused, though each would have begun within a step or two."""
    records = busy()
    door = Admission(100, num_blocks=20, block_size=16, queue=QueueLimits(512, max_wait_s=0.5), records=records)
    ask(door, 10, 10, 1, "a", num_queued=200, now_s=1100.0, num_before=24, has_media=has_media)
    with pytest.raises(Overloaded, match="with 26 before it"):
        ask(door, 10, 10, 1, "a", num_queued=200, now_s=1100.0, num_before=26, has_media=has_media)


def test_how_slowly_pictures_begin_says_nothing_about_text():
    records = Records(text_drain=drained(100.0, 50.0), media_drain=drained(5.0, 50.0))
    door = Admission(100, num_blocks=20, block_size=16, queue=QueueLimits(512, max_wait_s=0.5), records=records)
    ask(door, 10, 10, 1, "a", num_queued=80, now_s=1050.0, num_before=40, has_media=False)
    with pytest.raises(Overloaded):
        ask(door, 10, 10, 1, "a", num_queued=80, now_s=1050.0, num_before=40, has_media=True)


def test_a_place_in_the_queue_is_needed_whoever_goes_first():
    with pytest.raises(Overloaded, match="10 of at most 10"):
        ask(ROOMY, 10, 10, 1, "a", num_queued=10, now_s=1000.0, num_before=0, has_media=False)


def test_media_are_in_less_haste_the_more_of_them_are_refused_and_recover():
    records = busy()
    door = Admission(100, num_blocks=20, block_size=16, queue=QueueLimits(512, max_wait_s=0.5), records=records)

    def knock(times: int, num_before: int, *, has_media: bool = True) -> float:
        for _ in range(times):
            with contextlib.suppress(Overloaded):
                ask(door, 10, 10, 1, "a", num_queued=0, now_s=1100.0, num_before=num_before, has_media=has_media)
        return records.haste.value

    assert knock(100, 0) == MEDIA_HASTE
    assert knock(500, 400, has_media=False) == MEDIA_HASTE  # text is refused for its own sake
    assert MIN_MEDIA_HASTE < knock(64, 400) < 0.2 * MEDIA_HASTE  # a third of a second of the surge
    assert knock(500, 400) == MIN_MEDIA_HASTE
    assert knock(500, 0) == pytest.approx(MEDIA_HASTE, rel=0.01)


def test_while_nothing_is_known_of_how_fast_a_queue_drains_only_its_length_counts():
    door = Admission(100, num_blocks=20, block_size=16, queue=QueueLimits(512, max_wait_s=0.5), records=Records())
    ask(door, 10, 10, num_sequences=1, tenant="a", num_queued=511, now_s=0.0)


def test_a_request_that_can_never_fit_is_told_so_even_when_the_queue_is_full():
    with pytest.raises(ContextLengthExceeded):
        ask(ROOMY, 1000, 10, num_sequences=1, tenant="a", num_queued=10, now_s=1000.0)


def test_an_empty_prompt_is_a_bad_request():
    with pytest.raises(BadRequest, match="empty") as caught:
        ask(ROOMY, 0, 10, num_sequences=1, tenant="a", num_queued=0, now_s=1000.0)
    assert type(caught.value) is BadRequest
    assert issubclass(BadRequest, MmserveError)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([Candidate(0, 0)], 0),
        ([Candidate(0, 0), Candidate(64, 0), Candidate(32, 0)], 1),  # longest prefix
        ([Candidate(64, 900), Candidate(64, 100), Candidate(64, 500)], 1),  # then least pending
        ([Candidate(500, 400), Candidate(0, 0)], 0),  # a hit worth waiting for
        ([Candidate(500, 600), Candidate(0, 0)], 1),  # one that isn't
        ([Candidate(0.0, 0.4), Candidate(0.0, 0.3)], 1),
        ([Candidate(100, 100), Candidate(0, 0)], 1),  # no better either way: the idle one
        ([Candidate(0, 0), Candidate(0, 0)], 0),
        ([Candidate(0, 100, 50), Candidate(0, 100, 20)], 1),  # where it does less harm
        ([Candidate(0, 100, 50), Candidate(0, 200, 20)], 0),  # unless that takes too long
    ],
)
def test_a_sequence_goes_where_it_is_done_soonest(candidates: list[Candidate], chosen: int):
    assert place(candidates) == chosen


def test_a_common_system_prompt_does_not_send_everybody_to_one_replica():
    cached, pending = [300, 0, 0], [0, 0, 0]
    placed = []
    for _ in range(12):
        chosen = place([Candidate(*each) for each in zip(cached, pending, strict=True)])
        pending[chosen] += 400 - cached[chosen]
        cached[chosen] = 300
        placed.append(chosen)
    assert [placed.count(replica) for replica in range(3)] == [6, 3, 3]


def busy() -> Records:
    """Of a box where both kinds have always waited, and fifty of each began every second."""
    return Records(drain=drained(50.0, 100.0), text_drain=drained(50.0, 100.0), media_drain=drained(50.0, 100.0))


def drained(per_s: float, until_s: float) -> DrainRate:
    """Of a queue that is never empty."""
    rate = DrainRate()
    for i in range(int(per_s * until_s)):
        rate.left(1000.0, 1000.0 + (i + 1) / per_s, is_empty=False)
    return rate


@pytest.mark.parametrize(
    ("per_s", "num_queued", "retry_after_s"),
    [(4.0, 100, 25.0), (200.0, 512, 2.56), (200.0, 20, 1.0), (0.5, 512, 60.0)],
)
def test_who_is_refused_is_told_when_the_queue_will_have_drained(per_s: float, num_queued: int, retry_after_s: float):
    assert drained(per_s, 100.0).retry_after_s(num_queued, 1100.0) == pytest.approx(retry_after_s, rel=0.05)


def test_hours_without_a_queue_say_nothing_about_how_fast_it_drains():
    """By who left in the last half minute, a burst at a quiet hour would have been refused: one a second came, so one a second left."""
    rate = DrainRate()
    for second in range(20):
        rate.left(second, second + 0.02, is_empty=True)
    assert rate.wait_s(10, 20.0) == pytest.approx(0.2)


def test_those_who_begin_together_count_as_one_step_of_waiting():
    rate = DrainRate()
    for step in range(10):
        for _ in range(5):
            rate.left(0.0, 0.1 * (step + 1), is_empty=False)
    assert rate.wait_s(100, 1.0) == pytest.approx(2.0)


def test_who_overtakes_an_older_one_is_not_counted_twice():
    rate = DrainRate()
    rate.left(1.0, 2.0, is_empty=False)
    rate.left(0.0, 3.0, is_empty=True)  # came first, begins second: the queue was served all along
    assert rate.wait_s(1, 3.0) == pytest.approx(1.0)


def test_a_queue_of_which_only_the_newest_begin_is_a_queue_all_the_same():
    """Requests of a greedy tenant waited behind everybody else's, and each of those had hardly waited: the queue seemed to be empty."""
    rate = DrainRate()
    for i in range(100):
        rate.left(0.1 * i - 0.01, 0.1 * i, is_empty=False)
    assert rate.wait_s(10, 10.0) == pytest.approx(1.0, rel=0.05)


def test_only_those_who_left_last_say_how_fast_it_is_now():
    rate = drained(10.0, 30.0)
    for i in range(256):
        rate.left(0.0, 1030.0 + (i + 1) / 100.0, is_empty=False)
    assert rate.wait_s(100, 1033.0) == pytest.approx(1.0, rel=0.05)


def test_a_queue_from_which_nobody_was_seen_to_go_is_not_to_be_asked_again_soon():
    assert DrainRate().retry_after_s(1, 5.0) == 60.0
    stuck = drained(50.0, 100.0)
    assert stuck.retry_after_s(100, 1100.0) == pytest.approx(2.0, rel=0.05)
    assert stuck.retry_after_s(100, 1131.0) == 60.0
