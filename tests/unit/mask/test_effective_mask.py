"""Equations 1, 10 and 11: the effective mask, the share of a step that a weight keeps, and no negative zero."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.mask.effective_mask import effective_mask, published, scaled_step
from sparseforge_ds.mask.pattern import top_n

UNIT = st.floats(0, 1, width=32)


@given(st.lists(UNIT, min_size=8, max_size=8), UNIT)
def test_effective_mask_lies_between_soft_and_hard(values: list[float], x: float) -> None:
    mask = torch.tensor(values)
    kept = top_n(mask.view(-1, 4), 2).flatten()
    effective = effective_mask(mask, kept, x)
    torch.testing.assert_close(effective, x * mask + (1 - x) * kept.float())
    low, high = torch.minimum(mask, kept.float()), torch.maximum(mask, kept.float())
    assert ((effective >= low - 1e-7) & (effective <= high + 1e-7)).all()


def test_ends_are_exact() -> None:
    mask = torch.rand(64)
    kept = top_n(mask.view(-1, 4), 2).flatten()
    assert torch.equal(effective_mask(mask, kept, 1.0), mask)
    assert torch.equal(effective_mask(mask, kept, 0.0), kept.float())
    assert torch.equal(effective_mask(kept.float(), kept, 0.37), kept.float())


@given(st.lists(UNIT, min_size=8, max_size=8))
def test_a_weight_follows_by_its_share(shares: list[float]) -> None:
    before = torch.randn(8)
    dense = torch.randn(8)
    effective = torch.tensor(shares)
    followed = scaled_step(dense, before, effective)
    torch.testing.assert_close(followed, before + effective * (dense - before), atol=1e-6, rtol=1e-5)
    assert torch.equal(followed[effective == 1], dense[effective == 1])
    assert torch.equal(followed[effective == 0], before[effective == 0])
    assert torch.equal(scaled_step(before, before, effective), before), "a weight that stood still moved"


def test_published_zeros_are_positive() -> None:
    dense = torch.tensor([-1.5, 2.0, -0.0, 0.0, -3.0, 4.0])
    mask = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.5])
    out = published(dense, mask)
    assert out.tolist() == [0.0, 0.0, 0.0, 0.0, -3.0, 2.0]
    assert not out[:4].signbit().any()


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4))
def test_a_mask_of_one_publishes_every_bit(values: list[float]) -> None:
    dense = torch.tensor(values)
    assert torch.equal(published(dense, torch.ones(4)), dense)
