"""Equations 5 to 9: bounds of the gate, both thresholds, and the update against the literal loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.gate import gate, move_mask
from tests.reference import updated_mask

SCORES = st.lists(st.floats(-50, 50, width=32), min_size=8, max_size=8, unique=True)
UNIT = st.floats(0, 1, width=32)


def dials(temperature: float = 1.0, beta: float = 0.0, mid: float = 0.0, eta: float = 0.0, alpha: float = 1.0) -> Dials:
    return Dials(temperature, beta, mid, eta, alpha, x=1.0, phase="heating")


@given(SCORES, st.integers(1, 7), st.floats(0.01, 10))
def test_midpoint_puts_exactly_n_above_a_half(scores: list[float], n: int, temperature: float) -> None:
    chosen = gate(torch.tensor([scores]), n, temperature)
    soft, target = chosen.soft_GM[0], chosen.target_GM[0]
    assert ((soft >= 0) & (soft <= 1)).all()
    assert target.sum() == n
    assert (soft[target] >= 0.5).all() and (soft[~target] <= 0.5).all()
    if min(abs(a - b) for a in scores for b in scores if a != b) > 1e-3:
        assert (soft[target] > 0.5).all() and (soft[~target] < 0.5).all()


@given(SCORES, st.integers(1, 7), st.floats(0.01, 10))
def test_nth_holds_the_last_survivor_at_exactly_a_half(scores: list[float], n: int, temperature: float) -> None:
    chosen = gate(torch.tensor([scores]), n, temperature, "nth")
    survivors = chosen.soft_GM[0][chosen.target_GM[0]]
    assert survivors.min() == 0.5
    assert (chosen.soft_GM[0][~chosen.target_GM[0]] <= 0.5).all()


@given(SCORES, st.floats(-30, 30, width=32))
def test_the_gate_sees_differences_only(scores: list[float], shift: float) -> None:
    score_GM = torch.tensor([scores])
    plain, moved = gate(score_GM, 4, 1.0), gate(score_GM + shift, 4, 1.0)
    torch.testing.assert_close(plain.soft_GM, moved.soft_GM, atol=1e-4, rtol=0)


def test_a_cold_gate_is_the_target_and_a_hot_one_undecided() -> None:
    score_GM = torch.tensor([[3.0, 1.0, 2.0, -1.0]])
    assert gate(score_GM, 2, 1e-3).soft_GM.tolist() == [[1.0, 0.0, 1.0, 0.0]]
    torch.testing.assert_close(gate(score_GM, 2, 1e6).soft_GM, torch.full((1, 4), 0.5))


def test_equal_scores_are_decided_by_index() -> None:
    chosen = gate(torch.full((1, 4), 2.0), 2, 0.1)
    assert chosen.target_GM.tolist() == [[True, True, False, False]]
    assert chosen.soft_GM.tolist() == [[0.5] * 4]


@given(st.lists(UNIT, min_size=4, max_size=4), st.lists(UNIT, min_size=4, max_size=4), UNIT, UNIT, UNIT, st.data())
def test_a_moved_mask_stays_in_bounds(
    mask: list[float], soft: list[float], beta: float, mid: float, eta: float, data: st.DataObject
) -> None:
    alpha = data.draw(st.floats(0.125, 1, width=32))
    target = torch.tensor(data.draw(st.lists(st.booleans(), min_size=4, max_size=4)))
    moved = move_mask(torch.tensor(mask), torch.tensor(soft), target, dials(1.0, beta, mid, eta, alpha))
    assert ((moved >= 0) & (moved <= 1)).all()


def test_alpha_one_and_beta_one_is_the_target() -> None:
    target = torch.tensor([True, False, True, False])
    moved = move_mask(torch.rand(4), torch.rand(4), target, dials(beta=1.0))
    assert moved.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_alpha_zero_moves_nothing() -> None:
    mask = torch.rand(8)
    assert torch.equal(move_mask(mask, torch.rand(8), torch.rand(8) > 0.5, dials(alpha=0.0)), mask)


def test_the_penalty_pulls_a_mask_toward_its_target() -> None:
    mask, soft = torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5])
    target = torch.tensor([True, False])
    plain, pulled = move_mask(mask, soft, target, dials()), move_mask(mask, soft, target, dials(mid=1.0, eta=0.5))
    assert pulled[0] > plain[0] and pulled[1] < plain[1]


@pytest.mark.parametrize("threshold", ["midpoint", "nth"])
def test_gate_and_move_are_the_literal_loop(threshold: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, curvature, mask = (torch.rand(32, generator=generator) for _ in range(3))
    at = {"temperature": 0.3, "beta": 0.4, "mid_penalty": 0.7, "penalty_rate": 0.5, "mask_rate": 0.3}
    groups = [list(range(i, i + 4)) for i in range(0, 32, 4)]
    expected, target = updated_mask(mask.tolist(), weight.tolist(), curvature.tolist(), groups, 2, at, threshold, 1e-3)
    from sparseforge_ds.mask.importance import scalings, score_moments, standardized_score

    scaling = scalings(score_moments(weight, curvature)[None], 1e-3)[0]
    score_GM = standardized_score(weight, curvature, scaling).view(-1, 4)
    chosen = gate(score_GM, 2, 0.3, threshold)  # type: ignore[arg-type]
    moved = move_mask(mask, chosen.soft_GM.flatten(), chosen.target_GM.flatten(), dials(0.3, 0.4, 0.7, 0.5, 0.3))
    assert chosen.target_GM.flatten().float().tolist() == target
    torch.testing.assert_close(moved, torch.tensor(expected), atol=1e-6, rtol=0)
