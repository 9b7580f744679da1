"""Two arms compared while answers come in: how often a good canary is called bad, how soon a bad one is, and who goes where."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.canary import (
    LEAST_EVIDENCE,
    Arm,
    Breach,
    Comparison,
    Metric,
    Reasked,
    Tally,
    conversation,
    difference,
    evidence,
    slice_of,
    takes,
)
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, Message, Part

IMAGE, CLIP = MediaItem(MediaKind.IMAGE, b"picture"), MediaItem(MediaKind.AUDIO, b"clip")
CANARY, STABLE = (Arm("small-canary", "image", is_canary, is_watched=True) for is_canary in (True, False))
TALLIES = st.integers(0, 60).flatmap(lambda trials: st.builds(Tally, st.integers(0, trials), st.just(trials)))


def first_alarm(rng: random.Random, canary: float, stable: float, margin: float, nats: float, num_looks: int) -> int | None:
    """Pairs of answers until there is evidence, looked for after every one of them."""
    tallies = Tally(), Tally()
    for look in range(1, num_looks + 1):
        for tally, rate in zip(tallies, (canary, stable), strict=True):
            tally.trials += 1
            tally.hits += rng.random() < rate
        if evidence(*tallies, margin) >= nats:
            return look
    return None


# --- the test ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [0.0, 0.1, 0.5])
def test_a_canary_at_the_very_margin_is_called_bad_no_oftener_than_promised_however_often_one_looks(stable: float) -> None:
    chance, num_runs = 0.2, 150
    rng = random.Random(int(100 * stable))
    alarms = [first_alarm(rng, stable + 0.05, stable, 0.05, -math.log(chance), 150) for _ in range(num_runs)]
    spread = math.sqrt(chance * (1 - chance) / num_runs)
    assert sum(alarm is not None for alarm in alarms) / num_runs <= chance + 3 * spread


@pytest.mark.parametrize("seed", range(5))
def test_one_that_errs_four_times_in_ten_more_is_found_within_a_hundred_answers(seed: int) -> None:
    alarm = first_alarm(random.Random(seed), 0.42, 0.02, 0.05, LEAST_EVIDENCE, 100)
    assert alarm is not None


@settings(deadline=None)  # the machine may be busy
@given(TALLIES, TALLIES, st.floats(-0.9, 0.9))
def test_the_evidence_is_the_least_that_any_two_rates_within_the_limit_leave(canary: Tally, stable: Tally, limit: float) -> None:
    """A grid over both rates is the slow oracle."""

    def log_mixture(tally: Tally, rate: float) -> float:
        hits, misses = tally.hits, tally.trials - tally.hits
        a, b = hits + 0.25, misses + 1.0
        mixed = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b) - math.log(4)  # B(1/4, 1) is 4
        return mixed - hits * math.log(rate) - misses * math.log(1 - rate)

    grid = [(i + 0.5) / 60 for i in range(60)]
    found = evidence(canary, stable, limit)
    least = min((log_mixture(canary, c) + log_mixture(stable, s) for c in grid for s in grid if c - s <= limit), default=math.inf)
    assert found <= max(0.0, least) + 1e-9  # no pair leaves less
    if found > 0:  # and one on the edge leaves no more: the best of a grid, then of a finer one around it, and so on
        low, high = max(0.0, -limit), min(1.0, 1.0 - limit)
        for _ in range(8):
            points = [low + (high - low) * (i + 0.5) / 100 for i in range(100)]
            left = [log_mixture(canary, s + limit) + log_mixture(stable, s) for s in points]
            best = left.index(min(left))
            low, high = points[best - 1] if best > 0 else low, points[best + 1] if best < 99 else high
        assert found == pytest.approx(min(left), abs=0.01, rel=0.01)


@settings(deadline=None)  # the machine may be busy
@given(TALLIES, TALLIES)
def test_the_difference_lies_between_its_bounds_and_more_answers_bring_them_together(canary: Tally, stable: Tally) -> None:
    low, high = difference(canary, stable)
    assert -1 <= low <= canary.rate - stable.rate + 1e-6
    assert canary.rate - stable.rate - 1e-6 <= high <= 1
    if canary.trials and stable.trials:
        more = [difference(*(Tally(t.hits * times, t.trials * times) for t in (canary, stable))) for times in (1, 10, 100)]
        assert all(b[1] - b[0] <= a[1] - a[0] + 1e-6 for a, b in pairwise(more))


# --- slice by slice ----------------------------------------------------------------------------------------------------------


def test_a_fault_in_one_slice_is_not_averaged_away() -> None:
    comparison = Comparison(margin=0.05)
    rng = random.Random(1)
    breach: Breach | None = None
    for _ in range(2000):
        slice_name = rng.choice(["text"] * 18 + ["images"])
        for arm in (CANARY, STABLE):
            is_bad = arm.is_canary and slice_name == "images" and rng.random() < 0.6
            breach = breach or comparison.note(Arm(arm.canary, slice_name, arm.is_canary, True), Metric.UNGROUNDED, is_bad)
        if breach:
            break
    assert breach is not None
    assert (breach.slice_name, breach.metric) == ("images", Metric.UNGROUNDED)
    assert breach.canary.trials < 60
    assert sum(pair.canary.rate > 0 for pair in comparison.pairs.values()) == 1
    assert 0.05 < breach.at_least < breach.canary.rate


def test_answers_that_differ_breach_beyond_their_limit_and_never_within_it() -> None:
    rng = random.Random(3)
    for rate, limit, is_found in ((0.5, 0.25, True), (0.2, 0.25, False), (1.0, 1.0, False)):
        comparison = Comparison(margin=0.01, disagreement=limit)
        breaches = [comparison.note(CANARY, Metric.DIFFERENT, rng.random() < rate) for _ in range(150)]
        assert any(breaches) is is_found
        if is_found:
            first = next(filter(None, breaches))
            assert limit <= first.at_least < first.canary.rate
            assert str(first).startswith(f"different {first.canary}, at least")


def test_counts_of_an_earlier_life_go_on_counting() -> None:
    whole = Comparison(margin=0.05)
    notes = [(arm, arm.is_canary) for _ in range(30) for arm in (STABLE, CANARY)]
    index = next(i for i, (arm, hit) in enumerate(notes) if whole.note(arm, Metric.FAILED, hit))
    first = Comparison(margin=0.05)
    for arm, hit in notes[: index // 2]:
        assert first.note(arm, Metric.FAILED, hit) is None
    pair = first.pairs["image", Metric.FAILED]
    second = Comparison(0.05, {("image", "failed", is_canary): (tally.hits, tally.trials)
                               for is_canary, tally in ((True, pair.canary), (False, pair.stable))})  # fmt: skip
    assert [second.note(arm, Metric.FAILED, hit) is None for arm, hit in notes[index // 2 : index]] == [True] * (index - index // 2)
    assert second.note(*notes[index][:1], Metric.FAILED, notes[index][1]) is not None


def test_a_canary_has_passed_when_every_slice_that_was_seen_has() -> None:
    comparison = Comparison(margin=0.05)

    def answers(slice_name: str, num_pairs: int) -> None:
        for _ in range(num_pairs):
            for is_canary in (True, False):
                for metric in (Metric.FAILED, Metric.EMPTY):
                    assert comparison.note(Arm("small-canary", slice_name, is_canary, True), metric, False) is None

    assert not comparison.has_passed
    answers("text", 20)
    assert not comparison.has_passed
    answers("text", 400)
    assert comparison.has_passed
    answers("audio", 20)
    assert not comparison.has_passed
    answers("audio", 400)
    assert comparison.has_passed


# --- who goes where ----------------------------------------------------------------------------------------------------------


def chat(*parts: Part, tenant: str = "acme", later: tuple[str, ...] = ()) -> ChatRequest:
    messages = [Message("system", ("Be brief.",)), Message("user", parts)]
    messages += [Message(role, (text,)) for role, text in zip(("assistant", "user"), later, strict=False)]
    return ChatRequest(tuple(messages), tenant=tenant)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_a_share_of_the_conversations_is_drawn_and_another_one_for_other_weights(share: float) -> None:
    keys = [conversation(chat(f"question {i}")) for i in range(20_000)]
    drawn = {seed: {key for key in keys if takes(share, key, seed)} for seed in (b"first", b"second")}
    for seed, found in drawn.items():
        assert abs(len(found) / len(keys) - share) < 4 * math.sqrt(share * (1 - share) / len(keys))
        assert found == {key for key in reversed(keys) if takes(share, key, seed)}
    both = len(drawn[b"first"] & drawn[b"second"]) / len(keys)
    assert abs(both - share**2) < 4 * share / math.sqrt(len(keys)) + 4 / len(keys)


def test_the_whole_share_is_everybody_and_none_is_nobody() -> None:
    keys = [conversation(chat(f"question {i}")) for i in range(100)]
    assert all(takes(1.0, key, b"") for key in keys)
    assert not any(takes(0.0, key, b"") for key in keys)


def test_all_turns_of_a_conversation_go_the_same_way_and_other_conversations_their_own() -> None:
    first = conversation(chat("what is it?", IMAGE))
    assert conversation(chat("what is it?", IMAGE, later=("a cat", "and its color?"))) == first
    others = (chat("what is it?"), chat("what is it?", CLIP), chat(IMAGE, "what is it?"), chat("what is it?", IMAGE, tenant="other"))
    assert len({first, *map(conversation, others)}) == 5
    long = MediaItem(MediaKind.IMAGE, b"x" * 5000 + b"y")
    assert conversation(chat(long)) != conversation(chat(MediaItem(MediaKind.IMAGE, b"x" * 5001)))


def test_slices_are_called_as_the_evaluation_calls_them() -> None:
    mixes = [(), (IMAGE,), (IMAGE, IMAGE), (CLIP,), (IMAGE, CLIP), (IMAGE, IMAGE, CLIP)]
    assert [slice_of(mix) for mix in mixes] == ["text", "image", "images", "audio", "image+audio", "image+audio"]


def test_a_question_counts_once_and_when_its_time_is_over() -> None:
    """A probe that asks the same thing every second is one question that was asked again, not three hundred."""
    asked = Reasked(within_s=300)
    assert not list(asked.note(b"probe", CANARY, 0.0))
    assert not list(asked.note(b"once", STABLE, 1.0))
    for second in range(2, 300):
        assert not list(asked.note(b"probe", CANARY, second))
    assert list(asked.note(b"other", STABLE, 302.0)) == [(CANARY, True), (STABLE, False)]
    assert not list(asked.note(b"probe", CANARY, 303.0))  # anew


def test_what_is_remembered_of_questions_is_bounded() -> None:
    asked = Reasked(within_s=1e9, max_questions=3)
    settled = [arm for i in range(10) for arm in asked.note(b"%d" % i, CANARY, i)]
    assert settled == [(CANARY, False)] * 7
