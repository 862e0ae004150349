"""Equations 3 to 9 as `update_mask` has them: the paper's literal loop, exact ends, bounds, and each rate alone.

A mask that moves all the way at once (alpha = 1), without blend and penalty, is the soft gate itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.importance import scalings, score_moments
from sparseforge_ds.mask.pattern import NM, Pattern
from sparseforge_ds.mask.update import update_mask
from tests.reference import updated_mask
from tests.unit.mask.problem import DIALS, PATTERNS, elements_of, problem

LEAST = 50
SCORES = st.lists(st.floats(-LEAST, LEAST, width=32), min_size=8, max_size=8, unique=True)
UNIT = st.floats(0, 1, width=32)


@pytest.mark.parametrize(("pattern", "shape", "axis", "kind"), [case for case in PATTERNS if case[0] != NM(4, 4)])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("threshold", ["midpoint", "nth"])
def test_an_update_is_the_literal_loop(
    pattern: Pattern, shape: tuple[int, int], axis: int, kind: str, late: bool, threshold: str
) -> None:
    dials = replace(DIALS, beta=0.8, mask_rate=0.6) if late else DIALS
    dense, mask, curvature = problem(shape, kind)
    h = elements_of(curvature, dense.numel())
    scaling = scalings(score_moments(dense, h)[None], 1e-3)[0]
    index_GM = pattern.to_groups(torch.arange(mask.numel()), shape, axis)
    curvature_GM = None if h is None else h[index_GM]
    new_GM, target_GM = update_mask(
        dense[index_GM], mask[index_GM], curvature_GM, scaling, dials, pattern, threshold == "midpoint"
    )

    at = {"temperature": 0.3, "beta": dials.beta, "mid_penalty": 0.7, "penalty_rate": 0.5, "mask_rate": dials.mask_rate}
    ones = torch.ones_like(dense) if h is None else h
    lists = (mask.tolist(), dense.tolist(), ones.tolist(), index_GM.tolist())
    expected, target = updated_mask(*lists, pattern.kept_count, at, threshold, 1e-3)
    torch.testing.assert_close(new_GM, torch.tensor(expected)[index_GM], atol=2e-6, rtol=0)
    assert torch.equal(target_GM.float(), torch.tensor(target)[index_GM])


def test_ends_of_the_schedule_are_exact() -> None:
    """Reach the target at beta = alpha = 1, and move nothing at alpha = 0; a decided mask stays exactly 0 or 1."""
    dense, mask, _ = problem((8, 40), "none")
    scaling = scalings(score_moments(dense, None)[None], 1e-3)[0]
    dense_GM = dense.view(-1, 4)
    mask_GM = mask.view(-1, 4)

    def update(start_GM: Tensor, **dials: float) -> tuple[Tensor, Tensor]:
        return update_mask(dense_GM, start_GM, None, scaling, replace(DIALS, **dials), NM(2, 4))

    assert torch.equal(update(mask_GM, mask_rate=0.0)[0], mask_GM)
    hard_GM, target_GM = update(mask_GM, beta=1.0, mask_rate=1.0)
    assert torch.equal(hard_GM, target_GM.float())
    for rate in (0.1, 0.3, 0.7):
        assert torch.equal(update(hard_GM, beta=1.0, mask_rate=rate)[0], target_GM.float())


def dials(temperature: float = 1.0, beta: float = 0.0, mid: float = 0.0, eta: float = 0.0, alpha: float = 1.0) -> Dials:
    return Dials(temperature, beta, mid, eta, alpha, x=1.0)


def moved(
    mask: Tensor, score: Tensor, n: int, at: Dials, midpoint: bool = True, shift: float = 0
) -> tuple[Tensor, Tensor]:
    """Return new mask and target of one group with these scores plus `shift`: weights whose squares they are."""
    scaling = torch.tensor([0.0, LEAST - shift, 1.0], dtype=torch.float64)
    dense = (score.double() + LEAST).sqrt().float()
    new_GM, target_GM = update_mask(dense[None], mask[None], None, scaling, at, NM(n, len(score)), midpoint)
    return new_GM[0], target_GM[0]


def gate(
    score: list[float] | Tensor, n: int, temperature: float, midpoint: bool = True, shift: float = 0
) -> tuple[Tensor, Tensor]:
    """Soft gate and target."""
    score = torch.as_tensor(score, dtype=torch.float32)
    return moved(torch.rand(len(score)), score, n, dials(temperature), midpoint, shift)


@given(SCORES, st.integers(1, 7), st.floats(0.01, 10))
def test_midpoint_puts_exactly_n_above_a_half(scores: list[float], n: int, temperature: float) -> None:
    soft, target = gate(scores, n, temperature)
    assert ((soft >= 0) & (soft <= 1)).all()
    assert target.sum() == n
    assert (soft[target] >= 0.5).all() and (soft[~target] <= 0.5).all()
    if min(abs(a - b) for a in scores for b in scores if a != b) > 1e-3:
        assert (soft[target] > 0.5).all() and (soft[~target] < 0.5).all()


@given(SCORES, st.integers(1, 7), st.floats(0.01, 10))
def test_nth_holds_the_last_survivor_at_exactly_a_half(scores: list[float], n: int, temperature: float) -> None:
    soft, target = gate(scores, n, temperature, midpoint=False)
    assert soft[target].min() == 0.5
    assert (soft[~target] <= 0.5).all()


@given(SCORES, st.floats(-30, 30, width=32))
def test_the_gate_sees_differences_only(scores: list[float], shift: float) -> None:
    torch.testing.assert_close(gate(scores, 4, 1.0)[0], gate(scores, 4, 1.0, shift=shift)[0], atol=1e-4, rtol=0)


def test_a_cold_gate_is_the_target_and_a_hot_one_undecided() -> None:
    assert gate([3.0, 1.0, 2.0, -1.0], 2, 1e-3)[0].tolist() == [1.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(gate([3.0, 1.0, 2.0, -1.0], 2, 1e6)[0], torch.full((4,), 0.5), atol=1e-5, rtol=0)


def test_equal_scores_are_decided_by_index() -> None:
    soft, target = gate([2.0] * 4, 2, 0.1)
    assert target.tolist() == [True, True, False, False]
    assert soft.tolist() == [0.5] * 4


@given(st.lists(UNIT, min_size=4, max_size=4), st.lists(UNIT, min_size=4, max_size=4), UNIT, UNIT, UNIT, st.data())
def test_a_moved_mask_stays_in_bounds(
    mask: list[float], scores: list[float], beta: float, mid: float, eta: float, data: st.DataObject
) -> None:
    alpha = data.draw(st.floats(0.125, 1, width=32))
    new, _ = moved(torch.tensor(mask), torch.tensor(scores), 2, dials(1.0, beta, mid, eta, alpha))
    assert ((new >= 0) & (new <= 1)).all()


def test_alpha_one_and_beta_one_is_the_target() -> None:
    new, target = moved(torch.rand(4), torch.rand(4), 2, dials(beta=1.0))
    assert torch.equal(new, target.float()) and target.sum() == 2


def test_alpha_zero_moves_nothing() -> None:
    mask = torch.rand(8)
    assert torch.equal(moved(mask, torch.rand(8), 4, dials(alpha=0.0))[0], mask)


def test_the_penalty_pulls_a_mask_toward_its_target() -> None:
    mask = torch.tensor([0.6, 0.4])
    score = torch.tensor([0.2, 0.1])
    plain, pulled = (moved(mask, score, 1, dials(mid=mid, eta=0.5))[0] for mid in (0.0, 1.0))
    assert pulled[0] > plain[0] and pulled[1] < plain[1]
