"""What a step costs: learnt from noisy steps, unmoved by the odd slow one, never negative and never NaN."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.scheduler.cost_model import PRIOR, Coefficients, CostModel, StepShape, shape_of

SMALL_ON_CPU = Coefficients(step=30.0, row=0.8, token=1.9, pair=1e-4, context=2e-3)
QUICK_ON_GPU = Coefficients(step=4.0, row=0.02, token=0.03, pair=2e-6, context=3e-5)
BOXES = pytest.mark.parametrize("true", [SMALL_ON_CPU, QUICK_ON_GPU, PRIOR])


def some_ranges(rng: random.Random) -> list[tuple[int, int]]:
    """Rows of a step as a busy replica has them: decodes, and often a chunk of a prompt."""
    decodes = [(context, context + 1) for context in (rng.randrange(20, 4000) for _ in range(rng.randrange(0, 60)))]
    chunks = [(start, start + rng.randrange(2, 1000)) for start in (rng.randrange(0, 8000) for _ in range(rng.choice([0, 0, 1, 2])))]
    return decodes + chunks or [(5, 6)]


def duration_s(true: Coefficients, shape: StepShape) -> float:
    """The formula once more, term by term."""
    return sum(each * count for each, count in zip(true, (1, *shape), strict=True)) / 1e3


def learn(model: CostModel, true: Coefficients, num_steps: int, *, seed: int, noise: float = 0.05, slow: float = 0.0) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        shape = shape_of(some_ranges(rng))
        factor = 10.0 if rng.random() < slow else rng.gauss(1.0, noise)
        model.observe(shape, duration_s(true, shape) * max(factor, 0.1))


def worst_error(model: CostModel, true: Coefficients, seed: int) -> float:
    rng = random.Random(seed)
    shapes = [shape_of(some_ranges(rng)) for _ in range(100)]
    return max(abs(model.step_ms(shape) / (1e3 * duration_s(true, shape)) - 1) for shape in shapes)


def test_the_shape_of_a_step_counts_prefill_pairs_and_decode_context_apart():
    assert shape_of([(0, 10), (100, 120), (50, 51)]) == (3, 31, 50.0 + 2200.0, 51)


@BOXES
@pytest.mark.parametrize("seed", range(3))
def test_a_known_box_is_recognised_from_noisy_steps(true: Coefficients, seed: int):
    model = CostModel()
    learn(model, true, 1500, seed=seed)
    assert worst_error(model, true, seed + 100) < 0.08
    for name in ("step", "token", "pair"):
        assert getattr(model.coefficients, name) == pytest.approx(getattr(true, name), rel=0.3), name


@BOXES
def test_fifty_steps_are_enough_to_plan_by(true: Coefficients):
    model = CostModel()
    learn(model, true, 50, seed=1)
    assert worst_error(model, true, 2) < 0.35


@BOXES
def test_first_steps_that_take_ten_times_as_long_are_soon_forgiven(true: Coefficients):
    model = CostModel()
    learn(model, true, 3, seed=1, slow=1.0)
    learn(model, true, 300, seed=2)
    assert worst_error(model, true, 3) < 0.2


@BOXES
def test_one_slow_step_in_twenty_moves_nothing_by_much(true: Coefficients):
    model = CostModel()
    learn(model, true, 1000, seed=4, slow=0.05)
    assert worst_error(model, true, 5) < 0.2


def test_a_box_that_became_slower_is_noticed():
    model = CostModel()
    learn(model, QUICK_ON_GPU, 800, seed=6)
    learn(model, Coefficients._make(2 * each for each in QUICK_ON_GPU), 1000, seed=7)
    assert model.coefficients.token == pytest.approx(0.06, rel=0.3)


def test_what_prompts_cost_is_not_forgotten_while_nothing_but_decodes_run():
    model = CostModel()
    learn(model, SMALL_ON_CPU, 600, seed=8)
    before = model.row_ms(0, 1000)
    rng = random.Random(9)
    for _ in range(20_000):
        shape = shape_of([(context, context + 1) for context in (rng.randrange(20, 4000) for _ in range(8))])
        model.observe(shape, duration_s(SMALL_ON_CPU, shape) * rng.gauss(1.0, 0.05))
    assert model.row_ms(0, 1000) == pytest.approx(before, rel=0.5)


def test_a_step_without_a_measured_time_teaches_nothing():
    model = CostModel()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        model.observe(shape_of([(0, 100)]), seconds)
    assert model.coefficients == PRIOR


COUNTS = st.integers(0, 10_000)
STEPS = st.tuples(st.builds(StepShape, COUNTS, COUNTS, st.floats(0, 1e9), COUNTS), st.floats(allow_nan=True, allow_infinity=True))


@given(st.lists(STEPS, max_size=60))
def test_whatever_is_measured_no_coefficient_is_negative_or_nan(steps: list[tuple[StepShape, float]]):
    model = CostModel()
    for shape, seconds in steps:
        model.observe(shape, seconds)
        assert all(math.isfinite(each) and each >= 0 for each in model.coefficients)
        assert math.isfinite(model.step_ms(shape))


@given(st.builds(Coefficients, *[st.floats(1e-9, 10)] * 5), st.floats(-10, 1e4), st.integers(0, 10_000), st.integers(1, 4096))
def test_a_chunk_that_fits_the_time_is_the_longest_that_does(prior: Coefficients, ms: float, start: int, most: int):
    model = CostModel(prior)
    num_tokens = model.num_tokens_within(ms, start, most)
    assert 0 <= num_tokens <= most

    def cost_ms(count: int) -> float:  # of a prefill of any length, the shortest included
        return prior.row + prior.token * count + prior.pair * count * (start + count / 2)

    assert num_tokens == 0 or cost_ms(num_tokens) <= ms * (1 + 1e-9)
    assert num_tokens == most or cost_ms(num_tokens + 1) > ms * (1 - 1e-9)


def test_a_prior_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        CostModel(PRIOR._replace(pair=0.0))


def test_after_a_slow_step_the_next_may_be_slow_too():
    """The second piece of a long prompt was taken for hung where the first had taken as long: predictions learn slowly."""
    costs = CostModel()
    large, small = shape_of([(0, 1024)]), shape_of([(0, 1)])
    assert costs.slowest_ms(large) == math.inf
    costs.observe(large, 6.0)
    assert costs.slowest_ms(shape_of([(1024, 1524)])) >= 6000.0
    assert costs.slowest_ms(shape_of([(0, 5000)])) == math.inf
    for _ in range(200):
        costs.observe(small, 0.005)
    assert costs.slowest_ms(small) < 100.0
