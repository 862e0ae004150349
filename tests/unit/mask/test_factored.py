"""Row and column sums of any split equal the whole's, and the matrices made of them are the literal ones."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseforge_ds.mask.factored import add_sums, rank_one, shares, vanishes
from tests.reference import scored_curvature

R, C = 7, 5
BLOCK = {"importance": "fisher", "curvature": {"factored": True}}


def matrix(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(R, C, generator=generator) ** 3 + 0.1


def sums_of(full_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return full_RC.double().sum(1), full_RC.double().sum(0)


def factors(row_R: torch.Tensor, column_C: torch.Tensor) -> tuple[torch.Tensor, ...]:
    extents = torch.tensor([[len(row_R), len(column_C)]])
    return shares(torch.cat([row_R, column_C]), extents).split(extents.view(-1).tolist())


@settings(deadline=None)
@given(st.lists(st.integers(0, R * C), max_size=4))
def test_sums_of_any_split_add_up(cuts: list[int]) -> None:
    flat = matrix().view(-1)
    row_R = torch.zeros(R, dtype=torch.float64)
    column_C = torch.zeros(C, dtype=torch.float64)
    bounds = [0, *sorted(cuts), R * C]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        add_sums(flat[start:stop], start, row_R, column_C)
    for actual, reference in zip((row_R, column_C), sums_of(matrix()), strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(st.integers(0, R * C), st.integers(0, R * C))
def test_runs_are_those_of_the_whole(a: int, b: int) -> None:
    start, stop = min(a, b), max(a, b)
    full = rank_one(*factors(*sums_of(matrix())), 0, R * C)
    assert torch.equal(rank_one(*factors(*sums_of(matrix())), start, stop), full[start:stop])


def test_rank_one_is_the_literal_product() -> None:
    for seed in range(3):
        full = matrix(seed)
        assert (sums_of(full)[0] < 0).any() or (sums_of(full)[1] < 0).any() or seed
        expected = torch.tensor(scored_curvature(full.view(-1).tolist(), (R, C), BLOCK))
        torch.testing.assert_close(rank_one(*factors(*sums_of(full)), 0, R * C), expected, rtol=1e-6, atol=1e-9)


def test_a_product_stays_what_it_is() -> None:
    product = torch.outer(torch.rand(R) + 0.1, torch.rand(C) + 0.1)
    torch.testing.assert_close(rank_one(*factors(*sums_of(product)), 0, R * C).view(R, C), product)


def test_nothing_positive_is_no_curvature() -> None:
    assert rank_one(*factors(*sums_of(-matrix().abs())), 0, R * C).tolist() == [0.0] * (R * C)


def test_a_matrix_vanishes_by_its_rows_or_its_columns_alone() -> None:
    """Outweigh a row by the others in every column: all column sums are negative, a row sum is not."""
    by_columns = torch.full((R, C), -1.0)
    by_columns[0] = 2.0
    balanced = torch.zeros(R, C)  # all row sums are 0
    balanced[:, 0] = 1.0
    balanced[:, 1] = -1.0
    by_rows = (by_columns.t().contiguous(), balanced)
    for lost in (by_columns, *by_rows, balanced.t().contiguous(), -matrix().abs()):
        row, column = sums_of(lost)
        assert vanishes(row, column)
        assert not rank_one(*factors(row, column), 0, lost.numel()).any()
    one_infinite = -matrix().abs()
    one_infinite[1, 1] = -torch.inf
    not_finite = (one_infinite, torch.full((R, C), torch.nan), torch.full((R, C), -torch.inf))
    for kept in (matrix(), torch.zeros(R, C), *not_finite):
        assert not vanishes(*sums_of(kept))


def test_matrices_that_lie_end_to_end_are_those_that_lie_alone() -> None:
    """Compute a matrix of negative sums alone beside others, of which one is a billion times another."""
    alone = [
        sums_of(matrix()),
        sums_of(-matrix().abs()),
        sums_of(matrix(1)[:3] * 1e9),
        sums_of(matrix(2)[:, :4] * 1e-9),
    ]
    extents = torch.tensor([[len(row), len(column)] for row, column in alone])
    result = shares(torch.cat([part for pair in alone for part in pair]), extents)
    assert torch.equal(result, torch.cat([part for pair in alone for part in factors(*pair)]))
