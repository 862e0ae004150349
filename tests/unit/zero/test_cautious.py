"""Steps that do not go down the gradient are undone, element by element, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseforge_ds.mask import chunks, fusing
from sparseforge_ds.zero.cautious import hold_back


def after(before: Tensor, step: Tensor, gradient: Tensor) -> Tensor:
    weights = before + step
    hold_back(weights, before, gradient)
    return weights


def test_only_steps_down_the_gradient_stay() -> None:
    step = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.5, 0.0])
    gradient = torch.tensor([-1.0, 1.0, 1.0, -1.0, 0.0, 1.0])
    before = torch.full((6,), 2.0)
    assert after(before, step, gradient).tolist() == [2.5, 2.0, 1.5, 2.0, 2.0, 2.0]


def test_a_product_that_rounds_to_zero_still_has_a_sign() -> None:
    step, gradient = torch.tensor([1e-30, 1e-30]), torch.tensor([-1e-30, 1e-30])
    assert after(torch.zeros(2), step, gradient).tolist() == [step[0].item(), 0.0]


@pytest.mark.parametrize(("dtype", "of_gradient"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_shapes_chunks_and_dtypes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, of_gradient: torch.dtype
) -> None:
    monkeypatch.setattr(chunks, "ELEMENTS_PER_THREAD", 64)
    generator = torch.Generator().manual_seed(0)
    before, step, gradient = torch.randn(3, 7, 43, generator=generator).unbind()
    before, gradient = before.to(dtype), gradient.to(of_gradient)
    moved = before + step.to(dtype)
    expected = torch.where((moved - before).double() * gradient.double() < 0, moved, before)
    assert torch.equal(after(before, step.to(dtype), gradient), expected)
    assert not torch.equal(expected, moved) and not torch.equal(expected, before)


def test_compiled_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    before, step, gradient = torch.randn(3, 1003, generator=generator).unbind()
    with fusing.compiled(True):
        one = after(before, step, gradient)
    assert torch.equal(one, after(before, step, gradient))
