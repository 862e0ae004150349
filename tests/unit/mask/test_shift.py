"""The best shift of a run, against every pattern tried out."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseforge_ds.mask.shift import best_shift, removed_by


def least(run_K: Tensor, kept: int, members: int) -> float:
    """Return the least sum of squares that a pattern and a shift leave: the spread of the removed weights."""
    of_group = list(itertools.combinations(range(members), members - kept))
    groups = len(run_K) // members
    sums = []
    for chosen in itertools.product(of_group, repeat=groups):
        gone = torch.cat([run_K[g * members : (g + 1) * members][list(c)] for g, c in enumerate(chosen)])
        sums.append((gone - gone.mean()).square().sum().item())
    return min(sums)


def weights(runs: int, k: int, seed: int) -> Tensor:
    return torch.randn(runs, k, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_a_run_of_one_group_gets_the_best_there_is(seed: int) -> None:
    run_RK = weights(20, 4, seed)
    left_R, _ = removed_by(run_RK, best_shift(run_RK, 2, 4), 2, 4)
    expected = torch.tensor([least(run, 2, 4) for run in run_RK])
    torch.testing.assert_close(left_R, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("k", "kept", "members", "off"), [(8, 2, 4, 0.02), (12, 2, 4, 0.02), (8, 1, 4, 0.02), (16, 4, 8, 0.02)]
)
def test_runs_of_several_groups_come_near_it(k: int, kept: int, members: int, off: float) -> None:
    run_RK = weights(8 if k == 16 else 40, k, 0)
    left_R, _ = removed_by(run_RK, best_shift(run_RK, kept, members), members - kept, members)
    expected = torch.tensor([least(run, kept, members) for run in run_RK])
    assert (left_R >= expected - 1e-5).all()
    assert left_R.sum() <= (1 + off) * expected.sum()


@pytest.mark.parametrize(("k", "most"), [(4, 0.11), (8, 0.44), (16, 0.68), (64, 0.91)])
def test_normal_weights_lose_what_the_docstring_says(k: int, most: float) -> None:
    run_RK = weights(64000 // k, k, 1)
    left = removed_by(run_RK, best_shift(run_RK, 2, 4), 2, 4)[0].sum()
    assert most - 0.02 < left / removed_by(run_RK, torch.zeros(len(run_RK)), 2, 4)[0].sum() < most


def test_what_is_sparse_already_stays() -> None:
    run_RK = weights(10, 16, 2).view(10, 4, 4)
    run_RK[:, :, 1:3] = 0
    assert not best_shift(run_RK.view(10, 16), 2, 4).any()


def test_a_shift_depends_on_its_run_alone() -> None:
    run_RK = weights(5000, 16, 3)
    assert torch.equal(best_shift(run_RK, 2, 4)[1234:1300], best_shift(run_RK[1234:1300].clone(), 2, 4))
