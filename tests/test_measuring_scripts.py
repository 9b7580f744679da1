"""The arithmetic behind the figures that the scripts print: a wrong one here is a wrong one in the README."""

import argparse
import base64
import io
import json
import math
import random

import numpy as np
import pytest
from PIL import Image

from mmserve.gateway.multipart import parse_multipart
from scripts import bench_loop_lag, bench_pictures
from scripts.loopback import Scrape, bucket_quantile, loopback_url, quantile, same_photo_other_bytes
from scripts.measure_tiny import Tally, bound, grouped, macro_accuracy
from scripts.show_cache import broken_promises
from scripts.tiny.questions import Question
from scripts.tiny.score import Item, Verdict
from scripts.tiny.world import Scene, Thing, Utterance

KEPT = {
    "same_picture_at_once": {"encoded": 1},
    "behind_a_system_prompt": {
        "encoded_after_the_first": 0,
        "same_prefix": {"source": "kv", "cached_tokens": 592},
        "other_prefix": {"source": "memory"},
    },
    "after_a_restart": {"source": "disk", "encoded": 0},
}


def scene(*kinds: str) -> Scene:
    things = tuple(Thing(kind, i, (56.0, 56.0), 100.0, 0.0, 1.0, False) for i, kind in enumerate(kinds))
    return Scene("white", things, 0)


def verdict(question: Question, reply: str, *parts: Scene | Utterance, slice_name: str = "image") -> Verdict:
    return Verdict(Item(parts, 0, question, slice_name), reply)


NAME = Question("What is in the picture?", "I see a cat and a dog.", "name")


def test_a_named_object_that_is_not_there_is_counted_and_one_that_is_missing_lowers_coverage() -> None:
    tally = Tally.of([verdict(NAME, "I see a cat and a pig.", scene("dog", "cat")), verdict(NAME, NAME.answer, scene("dog", "cat"))])
    assert tally == Tally(items=2, right=1, mentions=4, false_mentions=1, found=3, present=4)


def test_an_object_that_is_denied_is_not_a_mention() -> None:
    question = Question("Is there a pig?", "No, I see no pig.", "presence", "pig")
    assert Tally.of([verdict(question, question.answer, scene("cat"))]) == Tally(1, 1, 0, 0, 0, 0)


def test_coverage_of_a_question_about_the_second_picture_asks_for_the_second_picture_only() -> None:
    question = Question("What is in the second picture?", "I see a pig.", "name", None, 1)
    assert Tally.of([verdict(question, "I see a pig.", scene("cat", "dog"), scene("pig"), slice_name="images")]).present == 1


def test_text_answers_have_no_objects_to_hallucinate() -> None:
    question = Question("Tell me a story about a cat.", "Once there was a cat.", "story")
    assert Tally.of([verdict(question, "Once there was a dog.", slice_name="text")]).mentions == 0


def test_saying_nothing_is_no_way_out() -> None:
    tally = Tally.of([verdict(NAME, "", scene("cat", "dog"))])
    assert tally.figures()["coverage"] == 0.0
    assert tally.figures()["hallucinated_object_rate"] is None
    assert tally.figures()["hallucinated_object_rate_upper_95"] == 1.0


def test_every_media_slice_weighs_the_same_in_the_overall_accuracy() -> None:
    right, wrong = verdict(NAME, NAME.answer, scene("cat", "dog")), verdict(NAME, "", scene("cat", "dog"), slice_name="images")
    assert macro_accuracy(grouped([right, right, right, wrong])) == 0.5


@pytest.mark.parametrize(
    ("count", "total", "side", "expected"), [(376, 400, -1, 0.9173), (0, 100, 1, 0.0263), (5, 5, -1, 0.6488), (0, 0, -1, 0)]
)
def test_wilson_bounds(count: int, total: int, side: int, expected: float) -> None:
    assert bound(count, total, side) == pytest.approx(expected, abs=1e-3)


def test_a_bucket_quantile_is_the_upper_bound_of_what_was_observed_in_between() -> None:
    before = {0.001: 10.0, 0.01: 20.0, math.inf: 20.0}
    after = {0.001: 60.0, 0.01: 119.0, math.inf: 120.0}
    assert [bucket_quantile(before, after, share) for share in (0.5, 0.99, 1.0)] == [0.001, 0.01, math.inf]
    assert math.isnan(bucket_quantile(after, after, 0.5))


def test_quantiles_of_nothing_are_not_a_number() -> None:
    assert math.isnan(quantile([], 0.5))
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_a_scrape_adds_up_the_label_sets_that_agree() -> None:
    text = (
        "# TYPE mmserve:encoder_items_per_batch histogram\n"
        'mmserve:encoder_items_per_batch_bucket{modality="image",le="+Inf"} 2.0\n'
        'mmserve:encoder_items_per_batch_sum{modality="image"} 7.0\n'
        'mmserve:encoder_items_per_batch_sum{modality="audio"} 5.0\n'
    )
    assert Scrape(text).total("encoder_items_per_batch_sum", {"modality": "image"}) == 7.0
    assert Scrape(text).total("encoder_items_per_batch_sum") == 12.0


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/", "http://localhost:80", "http://[::1]:8000"])
def test_load_may_be_put_on_this_machine(url: str) -> None:
    assert loopback_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8000", "http://example.com", "https://127.0.0.1", "http://127.0.0.1.example.com", "127.0.0.1"]
)
def test_load_is_put_on_no_other_machine(url: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        loopback_url(url)


def test_a_photo_with_another_comment_has_other_bytes_and_the_same_pixels() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(buffer, "JPEG")
    rng = random.Random(0)
    first, second = (same_photo_other_bytes(buffer.getvalue(), rng) for _ in range(2))
    assert first != second
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(first))), np.asarray(Image.open(io.BytesIO(second))))


def test_a_cache_report_that_keeps_every_promise_has_nothing_to_complain_of() -> None:
    assert broken_promises(KEPT) == []


@pytest.mark.parametrize(
    ("part", "change", "complaint"),
    [
        ("same_picture_at_once", {"encoded": 2}, "one encode"),
        ("behind_a_system_prompt", {"encoded_after_the_first": 1}, "no encode behind"),
        ("behind_a_system_prompt", {"same_prefix": {"source": "memory", "cached_tokens": 16}}, "not prefilled again"),
        ("behind_a_system_prompt", {"other_prefix": {"source": "encoded"}}, "memory behind another"),
        ("after_a_restart", {"source": "encoded"}, "from disk"),
    ],
)
def test_a_broken_promise_is_named(part: str, change: dict[str, object], complaint: str) -> None:
    (broken,) = broken_promises({**KEPT, part: {**KEPT[part], **change}})
    assert complaint in broken


def test_a_picture_that_is_encoded_twice_is_named() -> None:
    figures = {"distinct": {"encoded": 16}, "again": {"encoded": 0}, "one_picture": {"encoded": 1}}
    assert bench_pictures.broken_promises(16, figures) == []
    assert bench_pictures.broken_promises(16, {**figures, "again": {"encoded": 3}}) == ["again: 3 encoded, not 0"]


def test_each_photo_sent_is_the_same_picture_in_other_bytes_by_either_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_loop_lag, "photo", lambda pixels, quality: jpeg_of(pixels))
    photos = bench_loop_lag.Photos(7)
    sent = []
    for _ in range(2):
        _, _, body = photos.chat()
        url = json.loads(body)["messages"][0]["content"][1]["image_url"]["url"]
        sent.append(base64.b64decode(url.partition(",")[2], validate=True))
        _, _, form = photos.generate()
        sent.append(parse_multipart(form, b"photo")[-1].data)
    assert len(set(sent)) == 4
    original = Image.open(io.BytesIO(photos.jpeg)).tobytes()
    assert all(Image.open(io.BytesIO(data)).tobytes() == original for data in sent)


def jpeg_of(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()
