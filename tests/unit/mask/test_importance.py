"""Equations 3 and 4: sums over any split equal the whole, and the standardized score is the literal one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.mask.importance import MOMENTS, magnitude_moments, scalings
from sparseforge_ds.mask.kernels.scores import score_moments, standardized_score
from tests.reference import standardized


def random_matrix(seed: int = 0, numel: int = 240) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator), torch.randn(numel, generator=generator) ** 3


@given(st.lists(st.integers(0, 240), max_size=5), st.booleans())
def test_moments_of_any_split_add_up(cuts: list[int], magnitude: bool) -> None:
    dense, curvature = random_matrix()
    bounds = [0, *sorted(cuts), 240]
    parts = [
        score_moments(dense[a:b], None if magnitude else curvature[a:b])
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    full = score_moments(dense, None if magnitude else curvature)
    assert full.shape == (MOMENTS,)
    torch.testing.assert_close(torch.stack(parts).sum(0), full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("damping", [0.0, 1e-4, 10.0])
@pytest.mark.parametrize("magnitude", [False, True])
def test_score_is_the_literal_one(damping: float, magnitude: bool) -> None:
    dense, curvature = random_matrix()
    used = None if magnitude else curvature
    scaling = scalings(score_moments(dense, used)[None], damping)[0]
    score = standardized_score(dense, used, scaling)
    expected = standardized(dense.tolist(), None if magnitude else curvature.tolist(), damping)
    torch.testing.assert_close(score, torch.tensor(expected), rtol=1e-6, atol=1e-6)
    assert abs(score.mean().item()) < 1e-5
    assert score.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-4)


@given(st.floats(1e-12, 1e12), st.floats(1e-6, 1e6))
def test_scores_do_not_depend_on_the_scale_of_curvature_or_weight(h: float, w: float) -> None:
    dense, curvature = random_matrix(numel=40)
    plain = standardized_score(dense, curvature, scalings(score_moments(dense, curvature)[None], 1e-2)[0])
    dense, curvature = dense * w, curvature * h
    scaled = standardized_score(dense, curvature, scalings(score_moments(dense, curvature)[None], 1e-2)[0])
    torch.testing.assert_close(plain, scaled, rtol=1e-4, atol=1e-5)


def test_each_matrix_is_standardized_alone() -> None:
    first, second = random_matrix(1), random_matrix(2)
    table = scalings(torch.stack([score_moments(*first), score_moments(*second)]), 1e-4)
    assert torch.equal(table[1], scalings(score_moments(*second)[None], 1e-4)[0])


def test_a_matrix_of_constant_score_has_no_winner_by_noise() -> None:
    dense = torch.full((64,), 0.3)
    scaling = scalings(score_moments(dense, torch.full((64,), 2.0))[None], 1e-4)[0]
    assert standardized_score(dense, torch.full((64,), 2.0), scaling).tolist() == [0.0] * 64


def test_negative_curvature_counts_as_none() -> None:
    dense, curvature = random_matrix()
    clamped = curvature.clamp(min=0)
    assert torch.equal(score_moments(dense, curvature), score_moments(dense, clamped))


def test_moments_without_a_curvature_are_known_from_those_with_one() -> None:
    dense, curvature = random_matrix()
    expected = score_moments(dense, None)
    for used in (curvature, torch.zeros_like(curvature)):
        assert torch.equal(magnitude_moments(score_moments(dense, used)[None])[0], expected)
