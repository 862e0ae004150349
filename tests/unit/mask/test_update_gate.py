"""Equations 5 to 9 as `move_groups` has them: bounds of the gate, both thresholds, and what each rate does alone.

A mask that moves all the way at once (alpha = 1), without blend and penalty, is the soft gate itself.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.update import move_groups

LEAST = 50
SCORES = st.lists(st.floats(-LEAST, LEAST, width=32), min_size=8, max_size=8, unique=True)
UNIT = st.floats(0, 1, width=32)


def dials(temperature: float = 1.0, beta: float = 0.0, mid: float = 0.0, eta: float = 0.0, alpha: float = 1.0) -> Dials:
    return Dials(temperature, beta, mid, eta, alpha, x=1.0)


def moved(
    mask: Tensor, score: Tensor, n: int, at: Dials, midpoint: bool = True, shift: float = 0
) -> tuple[Tensor, Tensor]:
    """New mask and target of one group with these scores plus `shift`: weights whose squares they are, less a mean."""
    scaling = torch.tensor([0.0, LEAST - shift, 1.0], dtype=torch.float64)
    dense, mask = (score.double() + LEAST).sqrt().float(), mask.clone()
    chosen = move_groups(dense, mask, None, scaling, at, NM(n, len(score)), (1, len(score)), -1, midpoint)
    return mask, chosen.target


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
    mask, score = torch.tensor([0.6, 0.4]), torch.tensor([0.2, 0.1])
    plain, pulled = (moved(mask, score, 1, dials(mid=mid, eta=0.5))[0] for mid in (0.0, 1.0))
    assert pulled[0] > plain[0] and pulled[1] < plain[1]


@pytest.mark.parametrize("members", [3, 4])
@pytest.mark.parametrize("midpoint", [True, False])
def test_gates_do_not_depend_on_runs(members: int, midpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(members * 5000, generator=generator)
    shape, scaling = (5000, members), torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    found = []
    for elements in (1 << 10, 1 << 40):
        monkeypatch.setattr("sparseforge_ds.mask.chunks.ELEMENTS_PER_THREAD", elements)
        mask = torch.ones(score.numel())
        chosen = move_groups(score, mask, None, scaling, dials(0.3), NM(2, members), shape, -1, midpoint)
        found.append((mask, chosen.target, chosen.kept, chosen.disagrees))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
