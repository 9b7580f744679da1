"""The arithmetic of training and measuring the router, on answers made up so that the right result is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mmserve.composition import BUNDLED
from mmserve.route_classifier import FILE, RouteClassifier
from scripts.measure_router import Held, policies
from scripts.routing.outcomes import Attempt, Outcome, read_outcomes, write_outcomes
from scripts.train_router import ANSWERS, asked_of, auc, best_escalation, gains, sign_test, train


def outcome(seed: int, text: str, *, small: bool, large: bool, doubt: float = 0.0) -> Outcome:
    attempts = {
        "small": Attempt(small, (0.0, doubt, 0.0), 1.0, usd=1.0),
        "large": Attempt(large, (0.0,), 3.0, usd=3.0),
    }
    return Outcome(seed, "image", "count", text, 1, 0, attempts)


def world(num_items: int = 300) -> list[Outcome]:
    """Counting is what only the large decoder can do, and the small one doubts it."""
    return [
        outcome(i, "count the dogs", small=False, large=True, doubt=1.0 + i / 1000)
        if i % 6 == 0
        else outcome(i, f"what is thing {i}", small=True, large=True, doubt=0.1)
        for i in range(num_items)
    ]


def test_auc_counts_ties_as_halves() -> None:
    area, error = auc(np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, False, True, True]))
    assert area == pytest.approx(3.5 / 4)
    assert error > 0
    assert math.isnan(auc(np.zeros(3), np.zeros(3, bool))[0])


def test_escalation_is_worth_it_down_to_where_it_mends_less_than_one_in_twenty() -> None:
    doubt, gain = np.linspace(0, 1, 1000), np.zeros(1000, int)
    gain[-20:] = 1
    limit, net = best_escalation(doubt, gain)
    assert limit == pytest.approx((doubt[-20] + doubt[-21]) / 2)
    assert net == pytest.approx(20 * 0.95)
    assert best_escalation(doubt, -gain) == (None, 0.0)
    by_chance = np.zeros(1000, int)
    by_chance[-9:] = [1, 1, -1, 1, 1, -1, 1, -1, 1]
    assert best_escalation(doubt, by_chance) == (None, 0.0)
    assert sign_test(5, 0) == pytest.approx(1 / 32)
    assert sign_test(0, 3) == 1.0


def test_what_can_be_learnt_is_learnt(tmp_path: Path) -> None:
    router, report = train(world())
    (tmp_path / FILE).write_text(json.dumps(router))
    classifier = RouteClassifier.read(tmp_path / FILE)
    assert classifier is not None
    assert report["classifier_auc"] == 1.0
    assert report["only_large_right"] == 50
    hard, easy = (classifier.gain(asked_of(each)) for each in world()[:2])
    assert hard > classifier.threshold > easy
    assert train(world())[0] == router


def test_policies_are_counted_with_all_that_they_cost() -> None:
    questions = world(60)
    classifier = RouteClassifier({"bias": -9.0}, threshold=0.5, escalate_above=0.5, num_judged=3)
    points = {point.policy: point for point in policies(Held(questions, classifier), classifier)[0]}
    assert (points["all small"].right, points["all small"].usd_per_1000) == (50, 1000)
    assert (points["all large"].right, points["all large"].usd_per_1000) == (60, 3000)
    assert (points["escalation"].right, points["escalation"].usd_per_1000) == (60, pytest.approx(1500))  # 10 of 60 pay for both
    assert points["oracle"].usd_per_1000 == pytest.approx(1000 * (50 + 10 * 3) / 60)
    assert points["classifier"].share_large == 0


def test_answers_are_kept_as_they_were(tmp_path: Path) -> None:
    write_outcomes(tmp_path / "a.gz", reversed(world(5)))
    assert read_outcomes(tmp_path / "a.gz") == world(5)


def test_the_bundled_router_is_what_training_makes_of_the_answers_beside_it() -> None:
    """Weights alone may differ in their last digits, with the machine's linear algebra."""
    outcomes = read_outcomes(ANSWERS)
    bundled = json.loads((BUNDLED / FILE).read_text())
    assert int(np.sum(gains(outcomes) > 0)) == 11
    classifier = RouteClassifier.read(BUNDLED / FILE)
    assert classifier is not None
    assert bundled["escalate_above"] is None  # nor do they support a second answer
    assert max(classifier.gain(asked_of(each)) for each in outcomes) < classifier.threshold  # the data support no routing by words
