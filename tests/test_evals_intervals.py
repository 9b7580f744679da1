"""Bounds keep their word: against published values, and against many draws from a known truth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from mmserve.evals.intervals import Z_95, Observation, Share, cohens_kappa, mcnemar, rogan_gladen, trials_needed, wilson


def independent(outcomes: list[bool]) -> Share:
    return Share.of(Observation(outcome, 1, index) for index, outcome in enumerate(outcomes))


@pytest.mark.parametrize(("count", "total"), [(0, 10), (10, 10), (7, 10), (371, 400), (1, 3), (1996, 2000)])
def test_wilson_bounds_are_where_the_score_test_turns(count: int, total: int) -> None:
    """Found by bisection, as the definition has it: the share furthest away that a one-sided test at 5 % doesn't reject."""
    share = count / total

    def is_rejected(truth: float) -> bool:
        return abs(share - truth) > Z_95 * math.sqrt(truth * (1 - truth) / total)

    for side, far in ((-1, 1e-12), (+1, 1 - 1e-12)):
        near = share
        if share == round(far):
            assert wilson(share, total, side) == share
            continue
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (near, middle) if is_rejected(middle) else (middle, far)
        assert wilson(share, total, side) == pytest.approx(near, abs=1e-9)


@pytest.mark.parametrize(("share", "bar", "side"), [(0.94, 0.9, -1), (0.93, 0.9, -1), (1.0, 0.9, -1), (0.0, 0.04, 1), (0.015, 0.04, 1)])
def test_so_many_trials_clear_the_bar_and_one_fewer_does_not(share: float, bar: float, side: int) -> None:
    needed = trials_needed(share, bar, side)
    assert needed is not None

    def clears(trials: int) -> bool:
        bound = wilson(share, trials, side)
        return bound >= bar - 1e-12 if side < 0 else bound < bar

    assert clears(needed)
    assert not clears(needed - 1)


def test_no_number_of_trials_helps_a_share_on_the_wrong_side() -> None:
    assert trials_needed(0.89, 0.9, -1) is None
    assert trials_needed(0.04, 0.04, +1) is None


def test_items_that_fail_together_are_worth_fewer_trials() -> None:
    rng = random.Random(1)
    fate = [rng.random() < 0.8 for _ in range(100)]
    together = Share.of(Observation(fate[i // 4], 1, i // 4) for i in range(400))
    alone = independent([rng.random() < 0.8 for _ in range(400)])
    assert together.effective == pytest.approx(100, rel=0.05)
    assert alone.effective > 350
    assert together.lower < alone.lower


def test_where_all_is_right_each_cluster_is_one_trial() -> None:
    share = Share.of(Observation(1, 1, i // 4) for i in range(40))
    assert (share.value, share.effective) == (1.0, 10)


def test_one_cluster_alone_proves_nothing() -> None:
    share = Share.of(Observation(i != 0, 1, "all") for i in range(1000))
    assert share.effective == 1
    assert share.lower < 0.5


def coverage(draw: Callable[[random.Random], bool], seeds: int = 1000) -> float:
    return sum(draw(random.Random(seed)) for seed in range(seeds)) / seeds


@pytest.mark.parametrize("truth", [0.9, 0.95])
def test_the_clustered_bound_holds_nineteen_times_in_twenty(truth: float) -> None:
    """Clusters of four whose members share a fate half of the time."""

    def holds(rng: random.Random) -> bool:
        seen = []
        for cluster in range(100):
            fate = rng.random() < truth
            seen += [Observation(fate if rng.random() < 0.5 else rng.random() < truth, 1, cluster) for _ in range(4)]
        return Share.of(seen).lower <= truth

    assert coverage(holds) > 0.93


@pytest.mark.parametrize(
    ("truth", "sensitivity", "specificity", "num_labels"), [(0.8, 0.9, 0.8, 100), (0.3, 0.9, 0.75, 40), (0.1, 0.9, 0.75, 30)]
)
def test_each_corrected_bound_holds_nineteen_times_in_twenty_and_the_raw_one_does_not(
    truth: float, sensitivity: float, specificity: float, num_labels: int
) -> None:
    too_high = too_low = raw_misses = 0
    num_draws = 800
    for seed in range(num_draws):
        rng = random.Random(seed)
        seen = independent([rng.random() < (sensitivity if rng.random() < truth else 1 - specificity) for _ in range(300)])
        labelled = [independent([rng.random() < rate for _ in range(num_labels)]) for rate in (sensitivity, specificity)]
        corrected = rogan_gladen(seen, *labelled)
        assert corrected is not None
        too_high += corrected.lower > truth
        too_low += corrected.upper < truth
        raw_misses += not seen.lower <= truth <= seen.upper
    assert max(too_high, too_low) / num_draws < 0.07
    assert raw_misses / num_draws > 0.3


def test_a_rater_no_better_than_a_coin_can_not_be_corrected() -> None:
    half = independent([True, False] * 50)
    assert rogan_gladen(half, half, half) is None


def test_a_perfect_rater_needs_no_correction() -> None:
    perfect = independent([True] * 1000)
    corrected = rogan_gladen(independent([True] * 90 + [False] * 10), perfect, perfect)
    assert corrected is not None
    assert corrected.value == pytest.approx(0.9)


@pytest.mark.parametrize(("better", "worse", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (1, 9, 0.021484375), (9, 1, 0.021484375)])
def test_mcnemar_is_the_exact_binomial(better: int, worse: int, p: float) -> None:
    assert mcnemar(better, worse) == pytest.approx(p)


def test_kappa_is_agreement_beyond_chance() -> None:
    """Cohen's own kind of table: 20 and 15 of 50 agree, 5 and 10 don't; kappa is 0.4."""
    pairs = [("yes", "yes")] * 20 + [("yes", "no")] * 5 + [("no", "yes")] * 10 + [("no", "no")] * 15
    assert cohens_kappa(pairs) == pytest.approx(0.4)
    assert cohens_kappa([("yes", "yes")] * 9) is None
