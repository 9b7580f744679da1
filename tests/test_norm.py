"""The norm of few rows and that of many are the same function."""

from __future__ import annotations

import pytest
import torch

from mmserve.models.norm import RmsNorm

EPS = 1e-5


@pytest.mark.parametrize("num_rows", [1, 4, 5, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_values_are_divided_by_their_root_mean_square(num_rows: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    values = (3 * torch.randn(num_rows, 96, generator=generator) + 1).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    wide = values.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    got = RmsNorm(weight, EPS)(values)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_heads_are_normed_each_by_itself() -> None:
    heads = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = RmsNorm(torch.ones(8).bfloat16(), EPS)
    for row in range(2):
        for head in range(3):
            assert torch.equal(norm(heads)[row, head], norm(heads[row : row + 1, head])[0])


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other() -> None:
    values = torch.ones(2, 8).bfloat16()
    values[0, 3] = torch.inf
    got = RmsNorm(torch.ones(8).bfloat16(), EPS)(values)
    assert not got[0].isfinite().all()
    assert got[1].isfinite().all()
