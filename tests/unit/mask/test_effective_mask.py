"""Equations 1, 10 and 11: the effective mask, and publication without a negative zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.mask.bits import pack
from sparseforge_ds.mask.codes import decode, encode
from sparseforge_ds.mask.effective_mask import is_kept, masked_gradient, publish, soft_publish, soft_step
from sparseforge_ds.mask.pattern import top_n

UNIT = st.floats(0, 1, width=32)


def effective_mask(mask: torch.Tensor, hard: torch.Tensor, x: float) -> torch.Tensor:
    """What weights of 1 are published as."""
    out = torch.empty_like(mask)
    soft_publish(torch.ones_like(mask), mask, pack(hard), x, out)
    return out


@given(st.lists(UNIT, min_size=8, max_size=8), UNIT)
def test_effective_mask_lies_between_soft_and_hard(values: list[float], x: float) -> None:
    mask = torch.tensor(values)
    hard = top_n(mask.view(-1, 4), 2).flatten()
    effective = effective_mask(mask, hard, x)
    low, high = torch.minimum(mask, hard.float()), torch.maximum(mask, hard.float())
    assert ((effective >= low - 1e-7) & (effective <= high + 1e-7)).all()


def test_ends_are_exact() -> None:
    mask = torch.rand(64)
    hard = top_n(mask.view(-1, 4), 2).flatten()
    assert torch.equal(effective_mask(mask, hard, 1.0), mask)
    assert torch.equal(effective_mask(mask, hard, 0.0), hard.float())
    assert torch.equal(effective_mask(hard.float(), hard, 0.37), hard.float())


@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_is_followed_and_published(in_place: bool) -> None:
    dense, before, mask = torch.randn(101), torch.randn(101), encode(torch.rand(101))
    kept = torch.rand(101) < 0.5
    then, now = (x * decode(mask).double() + (1 - x) * kept.double() for x in (0.9, 0.8))
    expected = before + then * (dense - before)
    out = before if in_place else torch.empty(101)
    soft_step(dense, before, mask, pack(kept), 0.9, 0.8, out)
    torch.testing.assert_close(dense.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected * now, atol=1e-6, rtol=1e-5)
    published = torch.empty(101)
    soft_publish(dense, mask, pack(kept), 0.8, published)
    assert torch.equal(published, out)


def test_gradients_of_pruned_weights_are_positive_zeros() -> None:
    gradient, kept = torch.randn(203), torch.rand(203) < 0.5
    expected = torch.where(kept, gradient, 0.0)
    masked_gradient(gradient, pack(kept))
    assert torch.equal(gradient, expected) and not gradient[~kept].signbit().any()


def test_a_kept_zero_is_told_by_its_sign() -> None:
    assert is_kept(torch.tensor([0.0, -0.0, 1e-40, -3.0])).tolist() == [False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_zeros_are_positive(dtype: torch.dtype) -> None:
    dense = torch.tensor([-1.5, 2.0, -0.0, 0.0, -3.0, 4.0])
    mask = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.5])
    out = torch.full((6,), 9.0, dtype=dtype)
    publish(dense, mask, out)
    assert out.tolist() == [0.0, 0.0, 0.0, 0.0, -3.0, 2.0]
    assert not out[:4].signbit().any()


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4))
def test_a_mask_of_one_publishes_every_bit(values: list[float]) -> None:
    dense = torch.tensor(values)
    out = torch.empty(4)
    publish(dense, torch.ones(4), out)
    assert torch.equal(out, dense)


def test_publish_into_bf16_rounds_the_fp32_product_once() -> None:
    dense, mask = torch.randn(1000), torch.rand(1000)
    out = torch.empty(1000, dtype=torch.bfloat16)
    publish(dense, mask, out)
    assert torch.equal(out, (dense * mask).bfloat16())
