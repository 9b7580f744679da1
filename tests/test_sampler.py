"""Drawing tokens: exact on small vocabularies, by frequency where it is chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmserve.plan import RowSampling
from mmserve.worker.sampler import sample
from mmserve.worker.uniforms import uniforms

LOGITS = [0.0, 2.0, 1.0, -1.0, 1.5]


def draw(*rows: RowSampling, logits: list[float] | None = None) -> list[int | None]:
    batch = torch.tensor([logits or LOGITS] * len(rows))
    return [None if token is None else token.token_id for token in sample(batch, rows)]


def frequencies(num_draws: int = 20_000, logits: list[float] | None = None, **fields: float) -> list[float]:
    """How often each id is drawn over many positions of one seed."""
    rows = [RowSampling(seed=7, position=i, **{"temperature": 1.0, **fields}) for i in range(num_draws)]
    counts = np.bincount(draw(*rows, logits=logits), minlength=len(logits or LOGITS))
    return (counts / num_draws).tolist()


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value) for value in values]
    return [weight / sum(weights) for weight in weights]


def test_greedy_takes_the_best_and_the_lower_id_of_equals() -> None:
    assert draw(RowSampling()) == [1]
    assert draw(RowSampling(), logits=[1.0, 3.0, 3.0]) == [1]


def test_temperature_draws_by_the_softmax() -> None:
    assert frequencies() == pytest.approx(softmax(LOGITS), abs=0.015)
    assert frequencies(temperature=2.0) == pytest.approx(softmax([value / 2 for value in LOGITS]), abs=0.015)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-320])
def test_a_tiny_temperature_is_greedy_and_not_an_overflow(temperature: float) -> None:
    assert draw(*[RowSampling(temperature=temperature, seed=i) for i in range(20)]) == [1] * 20


def test_top_k_keeps_the_k_best() -> None:
    kept = softmax([2.0, 1.5])
    assert frequencies(top_k=2) == pytest.approx([0, kept[0], 0, 0, kept[1]], abs=0.015)
    assert frequencies(top_k=99) == pytest.approx(softmax(LOGITS), abs=0.015)


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    best, second = softmax(LOGITS)[1], softmax(LOGITS)[4]
    assert frequencies(top_p=best - 0.01, num_draws=100) == [0, 1, 0, 0, 0]
    kept = softmax([2.0, 1.5])
    assert frequencies(top_p=best + second - 0.01) == pytest.approx([0, kept[0], 0, 0, kept[1]], abs=0.015)
    assert frequencies(top_p=1e-9, num_draws=100) == [0, 1, 0, 0, 0]


def test_top_p_counts_within_what_top_k_left() -> None:
    share = softmax([2.0, 1.5])[0]
    assert frequencies(top_k=2, top_p=share - 0.01, num_draws=100) == [0, 1, 0, 0, 0]


def test_min_p_is_relative_to_the_best() -> None:
    kept = softmax([2.0, 1.5])
    assert frequencies(min_p=math.exp(-0.6)) == pytest.approx([0, kept[0], 0, 0, kept[1]], abs=0.015)


def test_filters_of_one_row_leave_its_neighbours_alone() -> None:
    plain = [RowSampling(temperature=1.0, seed=3, position=i) for i in range(50)]
    mixed = [row for i, plain_row in enumerate(plain) for row in (plain_row, RowSampling(temperature=1.0, top_k=1, seed=i), RowSampling())]
    assert draw(*mixed)[::3] == draw(*plain)
    assert draw(*mixed)[1::3] == [1] * 50


def spread(vocab_size: int, num_rows: int, width: float, seed: int = 0) -> torch.Tensor:
    """Equal rows of logits that a wide model could give, with many equals among them, as bfloat16 makes."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * width
    return logits.bfloat16().float().repeat(num_rows, 1)


def kept_by_sorting(logits: torch.Tensor, top_k: int, top_p: float) -> set[int]:
    """The slow way: best first, equals by id, until the share is reached."""
    shares = logits.double().softmax(-1).tolist()
    best = sorted(range(len(shares)), key=lambda i: (-shares[i], i))[: top_k or None]
    total, kept, held = sum(shares[i] for i in best), set[int](), 0.0
    for i in best:
        if kept and held >= top_p * total - 1e-12:
            break
        kept.add(i)
        held += shares[i]
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p", "width"),
    [(3, 1.0, 2.0), (40, 0.8, 2.0), (0, 0.9, 4.0), (300, 1.0, 1.0), (0, 0.6, 0.5), (290, 0.7, 0.5), (300, 0.6, 1.0), (700, 1.0, 1.0)],
)
def test_every_filter_keeps_what_sorting_keeps_whatever_its_size(top_k: int, top_p: float, width: float) -> None:
    num_draws = 4000
    logits = spread(700, num_draws, width)
    rows = [RowSampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=1, position=i) for i in range(num_draws)]
    drawn = {token.token_id for token in sample(logits.clone(), rows) if token is not None}
    kept = kept_by_sorting(logits[0], top_k, top_p)
    assert drawn <= kept
    shares = logits[0].softmax(-1)
    likely = {i for i in kept if shares[i] > 8 / num_draws}
    assert likely <= drawn


def test_a_draw_in_two_stages_has_the_shares_of_one() -> None:
    num_draws, vocab_size = 20_000, 1000
    logits = spread(vocab_size, num_draws, 1.5)
    rows = [RowSampling(temperature=1.0, seed=2, position=i) for i in range(num_draws)]
    counts = np.bincount([token.token_id for token in sample(logits.clone(), rows) if token is not None], minlength=vocab_size)
    expected = logits[0].softmax(-1).numpy() * num_draws
    # By tens, so that each is drawn often; a chi-square of 99 degrees exceeds 149 once in a thousand.
    counted, wanted = counts.reshape(100, 10).sum(1), expected.reshape(100, 10).sum(1)
    assert ((counted - wanted) ** 2 / wanted).sum() < 149


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.95}, {"top_k": 20}])
def test_noise_in_the_last_bits_of_the_logits_leaves_nearly_every_draw_alone(fields: dict[str, float]) -> None:
    logits = torch.randn(3000, 700, generator=torch.Generator().manual_seed(4)) * 2
    noisy = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)))
    rows = [RowSampling(**{"temperature": 1.0, "seed": 6, "position": i, **fields}) for i in range(len(logits))]
    pairs = zip(sample(logits.clone(), rows), sample(noisy, rows), strict=True)
    assert sum(a != b for a, b in pairs) <= 3


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0.3}])
def test_a_draw_depends_on_seed_and_position_and_never_on_the_batch(fields: dict[str, float]) -> None:
    rows = [
        RowSampling(**{"temperature": 1.0, "seed": seed, "position": position, **fields})
        for seed in (0, 2**64 - 1)
        for position in range(40)
    ]
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(len(rows), 700, generator=generator)
    together = [token.token_id for token in sample(batch.clone(), rows) if token is not None]
    alone = [sample(batch[i : i + 1].clone(), [row])[0].token_id for i, row in enumerate(rows)]  # type: ignore[union-attr]
    assert together == alone
    assert len(set(together)) > 5


def test_uniform_numbers_are_uniform_and_uncorrelated_between_neighbours() -> None:
    by_position = uniforms([5] * 10_000, range(10_000), torch.arange(1))[:, 0].numpy()
    by_seed = uniforms(range(10_000), [5] * 10_000, torch.arange(1))[:, 0].numpy()
    by_token = uniforms([5], [5], torch.arange(10_000))[0].numpy()
    for numbers in (by_position, by_seed, by_token):
        assert numbers.min() > 0
        assert numbers.max() < 1
        assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(1000, abs=130)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04


def test_the_same_seed_position_and_token_is_the_same_number_for_ever() -> None:
    assert uniforms([0, 1, 2**64 - 1], [0, 7, 100], torch.arange(2)).tolist() == [
        [0.13870941014555432, 0.9711020828012884],
        [0.421885377093601, 0.5547367047682259],
        [0.3574911816084209, 0.34167079741289647],
    ]


def test_a_row_whose_logits_are_not_finite_fails_alone() -> None:
    batch = torch.tensor([LOGITS] * 4)
    batch[0, 3] = float("nan")
    batch[1, 0] = float("inf")
    batch[2, 2] = -float("inf")
    rows = [RowSampling(temperature=1.0, logprobs=2), RowSampling(), RowSampling(top_k=1, temperature=1.0), RowSampling(logprobs=0)]
    assert [token and token.token_id for token in sample(batch, rows)] == [None, None, None, 1]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    out = np.array([1, 1, 4], np.int32)
    assert draw(RowSampling(presence_penalty=0.9, output_ids=out, prompt_ids=np.array([2, 2, 2], np.int32))) == [1]
    assert draw(RowSampling(presence_penalty=1.1, output_ids=out, prompt_ids=np.array([2, 2, 2], np.int32))) == [2]
    assert draw(RowSampling(frequency_penalty=0.45, output_ids=out)) == [1]
    assert draw(RowSampling(frequency_penalty=0.6, output_ids=out)) == [2]
    assert draw(RowSampling(presence_penalty=-2.0, output_ids=np.array([3, 0], np.int32))) == [0]


def test_repetition_penalty_weakens_prompt_and_output_whatever_their_sign() -> None:
    prompt, out = np.array([1], np.int32), np.array([4], np.int32)
    assert draw(RowSampling(repetition_penalty=1.4, prompt_ids=prompt, output_ids=out)) == [1]
    assert draw(RowSampling(repetition_penalty=2.5, prompt_ids=prompt, output_ids=out)) == [2]
    assert draw(RowSampling(repetition_penalty=2.0, prompt_ids=np.array([0], np.int32)), logits=[-1.0, -1.5]) == [1]


def test_logit_bias_and_bans_move_the_choice() -> None:
    assert draw(RowSampling(logit_bias={3: 100.0})) == [3]
    assert draw(RowSampling(logit_bias={1: -100.0})) == [4]
    assert draw(RowSampling(banned_ids=(1, 4))) == [2]
    assert draw(RowSampling(banned_ids=(1,), logit_bias={1: 100.0})) == [4]
    assert 1 not in draw(*[RowSampling(temperature=2.0, seed=i, banned_ids=(1,)) for i in range(100)])


def test_ids_beyond_the_vocabulary_are_passed_over() -> None:
    strange = np.array([5, 2**31 - 1, -1, 1], np.int32)
    row = RowSampling(logit_bias={5: 100.0, -1: 100.0}, banned_ids=(5, 10**6), frequency_penalty=0.1, repetition_penalty=1.1,
                      prompt_ids=strange, output_ids=strange)  # fmt: skip
    assert draw(row) == [1]


def test_logprobs_are_the_models_own_before_temperature_penalties_and_bias() -> None:
    row = RowSampling(temperature=0.1, logit_bias={3: 100.0}, logprobs=2)
    (token,) = sample(torch.tensor([LOGITS]), [row])
    expected = [math.log(p) for p in softmax(LOGITS)]
    assert token is not None
    assert token.token_id == 3
    assert token.logprob == pytest.approx(expected[3], abs=1e-5)
    assert [token_id for token_id, _ in token.top] == [1, 4]
    assert [value for _, value in token.top] == pytest.approx([expected[1], expected[4]], abs=1e-5)


def test_logprobs_zero_reports_the_drawn_token_only_and_many_are_cut_to_the_vocabulary() -> None:
    none, many = sample(torch.tensor([LOGITS] * 2), [RowSampling(logprobs=0), RowSampling(logprobs=20)])
    assert none is not None
    assert many is not None
    assert none.top == ()
    assert none.logprob is not None
    assert [token_id for token_id, _ in many.top] == [1, 4, 2, 0, 3]


def test_the_entropy_is_the_models_own_and_of_those_rows_that_ask_for_it() -> None:
    rows = [RowSampling(), RowSampling(entropy=True), RowSampling(entropy=True, temperature=2.0, logit_bias={0: 50.0}, logprobs=1)]
    tokens = sample(torch.tensor([LOGITS] * 3), rows)
    shares = softmax(LOGITS)
    expected = -sum(share * math.log(share) for share in shares)
    assert [None if token is None else token.entropy for token in tokens] == [None, pytest.approx(expected), pytest.approx(expected)]
    assert [len(token.top) for token in tokens if token is not None] == [0, 0, 1]


def test_a_row_that_is_not_finite_has_no_entropy() -> None:
    logits = torch.tensor([LOGITS, [math.nan] * 5])
    first, second = sample(logits, [RowSampling(entropy=True)] * 2)
    assert first is not None
    assert second is None
