"""What users say of answers: alarms that name what rose, and labels that no client can add to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmserve.answer_quality import AnswerQuality
from mmserve.grounding.mentions import find_mentions
from mmserve.grounding.verdict import Finding, Report, Verdict
from mmserve.grounding.vocabulary import Vocabulary
from mmserve.ledger import Feedback, Ledger
from mmserve.metrics import Metrics


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def rate(quality: AnswerQuality, number: int, rating: str, now_s: float, *, regenerated: bool = False) -> None:
    quality.note_answer(f"r{number}", str(number).encode(), "acme", "image", now_s)
    quality.note_feedback(Feedback(f"r{number}", "acme", rating, regenerated, now_s), now_s)


def verdict(text: str, *supported: bool) -> Verdict:
    mentions = find_mentions(text, Vocabulary({"cat": [], "dog": []}))
    return Verdict(tuple(Finding(m, text[m.start : m.stop], 0.5, is_there) for m, is_there in zip(mentions, supported, strict=True)))


def test_thumbs_that_turn_down_are_told_once_with_the_mix_of_media(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    quality = AnswerQuality(ledger, metrics)
    for i in range(400):
        rate(quality, i, "down" if i % 20 == 0 else "up", 20.0 * i)
    with caplog.at_level(logging.WARNING, logger="mmserve.answer_quality"):
        for i in range(400, 460):
            rate(quality, i, "down", 20.0 * i)
    assert metrics.registry.get_sample_value("mmserve:quality_alarms_total", {"what": "thumbs_down", "modality_mix": "image"}) == 1
    assert len(caplog.messages) == 1
    assert "thumbs_down=" in caplog.messages[0]
    assert "mix=image" in caplog.messages[0]


def test_ratings_of_answers_that_nobody_gave_raise_no_alarm_and_are_one_label(ledger: Ledger) -> None:
    metrics = Metrics()
    quality = AnswerQuality(ledger, metrics)
    for i in range(2000):
        quality.note_feedback(Feedback(f"forged-{i}", "acme", "up" if i < 1000 else "down", True, 10.0 * i), 10.0 * i)
    text = metrics.render().decode()
    assert 'feedback_ratings_total{modality_mix="unknown",rating="down"} 1000.0' in text
    assert "forged" not in text
    assert "quality_alarms_total{" not in text


def test_a_client_that_says_it_regenerated_is_counted_apart(ledger: Ledger) -> None:
    metrics = Metrics()
    quality = AnswerQuality(ledger, metrics)
    rate(quality, 0, "down", 0.0, regenerated=True)
    assert metrics.registry.get_sample_value("mmserve:regenerations_total", {"modality_mix": "image", "seen_by": "client"}) == 1


def test_only_samples_are_watched_since_who_asks_for_the_guardrail_may_be_unlike_the_others(ledger: Ledger) -> None:
    metrics = Metrics()
    quality = AnswerQuality(ledger, metrics)
    for i in range(400):
        quality.note_grounding(f"a{i}", "small", "image", Report("sample", (verdict("a cat", True),)), 20.0 * i)
    for i in range(400, 460):
        quality.note_grounding(f"b{i}", "small", "image", Report("flag", (verdict("a cat", False),)), 20.0 * i)
    what = {"what": "unsupported", "modality_mix": "image"}
    assert metrics.registry.get_sample_value("mmserve:quality_alarms_total", what) is None
    for i in range(400, 460):
        quality.note_grounding(f"c{i}", "small", "image", Report("sample", (verdict("a cat and a dog", True, False),)), 20.0 * i)
    assert metrics.registry.get_sample_value("mmserve:quality_alarms_total", what) == 1


def test_the_ledger_keeps_what_was_found_even_if_that_is_nothing(ledger: Ledger) -> None:
    quality = AnswerQuality(ledger, Metrics())
    quality.note_grounding("a", "small", "image", Report("flag", (verdict("a cat, no dog", True, None),)), 0.0)  # type: ignore[arg-type]
    quality.note_grounding("b", "small", "image", Report("regenerate", is_unavailable=True), 0.0)
    quality.note_grounding("c", "small", "image", Report("regenerate", (verdict("a cat", True),), num_draws=2), 0.0)
    assert ledger.flush()
    rows = ledger._db.execute("SELECT request_id, outcome, grounding_score, num_mentions, num_draws FROM grounding").fetchall()
    assert rows == [("a", "supported", 1.0, 1, 1), ("b", "unavailable", None, 0, 1), ("c", "regenerated", 1.0, 1, 2)]
    assert ledger.num_lost == 0
