"""The bench's pure parts: what arrives when, what it says, and the figures, against slow oracles."""

from __future__ import annotations

import io
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmserve.bench.client import Outcome, Stopwatch, StreamFailed
from mmserve.bench.content import Content, random_clip, random_picture, request_bodies
from mmserve.bench.isolation import compare, plan_burst
from mmserve.bench.statistics import is_good, peak_concurrency, peak_rate, spread, summarize
from mmserve.bench.traffic import POOL_SIZE, Modality, PlannedRequest, Traffic, arrival_times, parse_shares, plan_requests, zipf

TEXT_ONLY = {Modality.TEXT: 1.0}
TRAFFIC = Traffic(num_prompts=2000, request_rate=10, burstiness=1.0, mix=TEXT_ONLY, repeat_rate=0.0, seed=0)
CONTENT = Content(
    input_len=12, output_len=8, image_sizes={(64, 48): 1.0}, audio_len_s=0.25, ignore_eos=True, temperature=0.0, seed=0
)  # fmt: skip


def answered(start_s: float = 0.0, ttft_s: float = 0.1, gaps: tuple[float, ...] = (), **fields: Any) -> Outcome:
    latency_s = ttft_s + sum(gaps)
    fields = {"input_tokens": 5, "output_tokens": 1 + len(gaps), "has_usage": True, **fields}
    return Outcome(Modality.TEXT, None, "", start_s, 0.0, ttft_s, gaps, latency_s, **fields)


def refused(failure: str = "503") -> Outcome:
    return Outcome(Modality.IMAGE, failure, "overloaded", 0.0, 0.0, latency_s=0.01)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_gaps_vary_as_burstiness_says_and_the_rate_is_exact(burstiness: float, variation: float) -> None:
    times = arrival_times(replace(TRAFFIC, burstiness=burstiness))
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(200)
    assert min(gaps) >= 0
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(variation, rel=0.15)


def test_at_an_infinite_rate_everything_arrives_at_once_and_carries_the_same() -> None:
    now, later = plan_requests(replace(TRAFFIC, request_rate=math.inf)), plan_requests(TRAFFIC)
    assert {request.arrival_s for request in now} == {0.0}
    assert list(now) == [replace(request, arrival_s=0.0) for request in later]


def test_the_mix_and_the_repeats_come_in_their_shares_and_half_of_the_repeats_are_led() -> None:
    mix = {Modality.TEXT: 0.5, Modality.IMAGE: 0.3, Modality.IMAGE_AUDIO: 0.2}
    planned = plan_requests(replace(TRAFFIC, mix=mix, repeat_rate=0.4))
    counts = Counter(request.modality for request in planned)
    assert {modality: counts[modality] / 2000 for modality in mix} == pytest.approx(mix, abs=0.04)
    repeats = [request for request in planned if request.subject < POOL_SIZE]
    assert len(repeats) / 2000 == pytest.approx(0.4, abs=0.04)
    assert sum(request.lead is not None for request in repeats) / len(repeats) == pytest.approx(0.5, abs=0.06)
    assert all(request.lead is None for request in planned if request.subject >= POOL_SIZE)


def test_the_first_rank_of_the_pool_is_drawn_twice_as_often_as_the_second() -> None:
    chances = zipf(4)
    assert list(chances / chances[-1]) == pytest.approx([4, 2, 4 / 3, 1])


def test_shares_are_scaled_to_one() -> None:
    assert parse_shares("text=3,image=1") == {"text": 0.75, "image": 0.25}
    assert parse_shares("640x480") == {"640x480": 1.0}


@pytest.mark.parametrize("text", ["", "a,b", "a=1,a=1", "a=x", "a=-1,b=2", "a=0", "a=nan", "c=1"])
def test_shares_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_shares(text, ["a", "b"])


def test_a_repeat_is_the_same_body_and_a_led_one_is_the_same_behind_other_words() -> None:
    first = PlannedRequest(0.0, Modality.IMAGE_AUDIO, subject=3, lead=None)
    led = replace(first, lead=70)
    other = replace(first, subject=4)
    a, b, c, d = (orjson.loads(body)["messages"][0]["content"] for body in request_bodies((first, first, led, other), CONTENT, "m"))
    assert [part["type"] for part in a] == ["image_url", "input_audio", "text"]
    assert a == b == c[1:]
    assert c[0]["type"] == "text"
    assert all(mine != yours for mine, yours in zip(a, d, strict=True))


def test_text_alone_goes_as_a_string_and_another_seed_says_something_else() -> None:
    planned = (PlannedRequest(0.0, Modality.TEXT, subject=0, lead=None),)
    (body,), (other,) = (map(orjson.loads, request_bodies(planned, replace(CONTENT, seed=seed), "m")) for seed in (0, 1))
    assert len(body["messages"][0]["content"].split()) == 12
    assert body["messages"] != other["messages"]
    assert (body["stream_options"], body["ignore_eos"], body["max_tokens"]) == ({"include_usage": True}, True, 8)


def test_pictures_and_clips_can_be_decoded() -> None:
    random = np.random.default_rng(0)
    with Image.open(io.BytesIO(random_picture(random, (123, 45)))) as picture:
        picture.load()
        assert (picture.format, picture.size) == ("JPEG", (123, 45))
    samples, rate = soundfile.read(io.BytesIO(random_clip(random, 0.5)))
    assert (len(samples), rate) == (8000, 16000)


def test_a_stopwatch_counts_pieces_with_text_and_believes_the_usage() -> None:
    watch = Stopwatch(10.0)
    for now, data in [
        (10.1, b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}'),
        (10.4, b'{"choices": [{"delta": {"content": "It"}}]}'),
        (10.5, b'{"choices": [{"delta": {"content": " is"}}], "usage": null}'),
        (10.8, b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}'),
        (10.9, b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'),
        (11.9, b"[DONE]"),
    ]:
        watch.feed(b"data: " + data + b"\n", now)
    watch.feed(b": keep-alive\n", 12.0)
    assert watch.done
    measured = watch.measured()
    assert measured.pop("itl_s") == pytest.approx((0.1,))
    assert measured == pytest.approx({"ttft_s": 0.4, "latency_s": 0.9, "input_tokens": 7, "output_tokens": 3, "has_usage": True})


def test_an_error_in_a_stream_is_a_failure_with_its_message() -> None:
    with pytest.raises(StreamFailed, match="worker lost"):
        Stopwatch(0.0).feed(b'data: {"error": {"message": "worker lost"}}', 1.0)


def test_failures_are_counted_by_kind_and_never_dropped() -> None:
    outcomes = [answered(), refused(), refused(), refused("disconnected")]
    result = summarize(outcomes, 2.0, percentiles=[99], goodput={})
    assert (result["completed"], result["failed"]) == (1, 3)
    assert result["failures"] == {"503": 2, "disconnected": 1}
    assert (result["request_throughput"], result["request_goodput"]) == (0.5, None)


def test_a_run_in_which_all_failed_has_no_times() -> None:
    result = summarize([refused()], 1.0, percentiles=[99.9], goodput={"ttft": 1})
    assert result["p99.9_ttft_ms"] is None
    assert (result["request_goodput"], result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (0, 0, 0)


def test_goodput_counts_what_keeps_every_bound() -> None:
    bounds = {"ttft": 200.0, "tpot": 50.0}
    assert is_good(answered(ttft_s=0.2, gaps=(0.05,)), {"ttft": 200.0, "tpot": 51.0})
    assert not is_good(answered(ttft_s=0.1, gaps=(0.06,)), bounds)
    assert not is_good(answered(ttft_s=0.3, gaps=(0.04,)), bounds)
    assert is_good(answered(ttft_s=0.1), bounds)  # one token has no time per token after it


@given(st.lists(st.floats(0, 1e4), min_size=1), st.sampled_from([0.0, 50.0, 90.0, 99.0, 100.0]))
def test_percentiles_are_those_of_the_sorted_list(values: list[float], rank: float) -> None:
    place = (len(values) - 1) * rank / 100
    below, above = sorted(values)[math.floor(place)], sorted(values)[math.ceil(place)]
    figures = spread("ttft", values, [rank])
    assert figures[f"p{rank:g}_ttft_ms"] == pytest.approx(below + (above - below) * (place % 1), abs=1e-6)
    assert figures["mean_ttft_ms"] == pytest.approx(math.fsum(values) / len(values))


requests = st.builds(
    lambda start, ttft, gaps: answered(start / 8, ttft / 8, tuple(gap / 8 for gap in gaps)),
    st.integers(0, 40), st.integers(1, 16), st.lists(st.integers(0, 8), max_size=6),
)  # fmt: skip


@given(st.lists(requests, min_size=1, max_size=12))
def test_peaks_are_what_looking_at_every_moment_finds(outcomes: list[Outcome]) -> None:
    busy = [sum(one.start_s <= now / 8 < one.start_s + one.latency_s for one in outcomes) for now in range(200)]
    assert peak_concurrency(outcomes) == max(busy)
    first = min(one.start_s for one in outcomes)
    pieces = [one.start_s - first + one.ttft_s + sum(one.itl_s[:count]) for one in outcomes for count in range(len(one.itl_s) + 1)]
    assert peak_rate(outcomes) == max(sum(second <= piece < second + 1 for piece in pieces) for second in range(30))


def test_the_burst_lasts_as_long_as_the_text_and_leaves_its_arrivals_alone() -> None:
    text, together = plan_burst(replace(TRAFFIC, num_prompts=50), burst_rate=20)
    assert [request for request in together if request.modality is Modality.TEXT] == list(text)
    pictures = [request.arrival_s for request in together if request.modality is Modality.IMAGE]
    assert len(pictures) == 100
    assert max(pictures) == pytest.approx(5)


def test_a_ratio_is_left_open_where_there_is_nothing_to_divide() -> None:
    alone, burst = {"a": 2.0, "b": 0.0, "c": 1.0, "d": None}, {"a": 3.0, "b": 1.0, "c": None, "d": 1.0}
    assert {name: figures["ratio"] for name, figures in compare(alone, burst, "abcd").items()} == {
        "a": 1.5,
        "b": None,
        "c": None,
        "d": None,
    }
