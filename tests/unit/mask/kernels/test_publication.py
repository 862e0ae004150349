"""Steps and publications of flat partitions have the bits of `mask.effective_mask`, step by step and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseforge_ds.mask.effective_mask import effective_mask, published, scaled_step
from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.mask.kernels.bits import pack
from sparseforge_ds.mask.kernels.codes import CODE, stored_as, values_of
from sparseforge_ds.mask.kernels.publication import (
    masked_gradient,
    publish,
    soft_publish,
    soft_step,
)

ARGUMENTS = [(1003, CODE, torch.float32), (64, CODE, torch.float32), (333, torch.float32, torch.bfloat16)]
"""Elements, storage of the mask, dtype of masters."""


def problem(count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return W', W, the mask as it is stored, and bool of what is kept; some of the mask is decided."""
    generator = torch.Generator().manual_seed(count)
    before, dense = torch.randn(2, count, generator=generator)
    dense[::7] = before[::7]
    mask = (torch.rand(count, generator=generator) * 1.6 - 0.3).clamp(0, 1)
    return before, dense, stored_as(mask, dtype), torch.rand(count, generator=generator) > 0.5


def fast_step(
    count: int, dtype: torch.dtype, out_dtype: torch.dtype, x_before: float, x: float, aliased: bool
) -> list[Tensor]:
    """Return W and the master after a soft step, the master that is published alone, and a masked gradient."""
    before, dense, mask, kept = problem(count, dtype)
    out = before.clone() if aliased else torch.empty(count, dtype=out_dtype)
    soft_step(dense, out if aliased else before, mask, pack(kept), x_before, x, out)
    alone = torch.empty(count, dtype=out_dtype)
    soft_publish(dense, mask, pack(kept), x, alone)
    gradient = dense.to(out_dtype, copy=True)
    masked_gradient(gradient, pack(kept))
    return [dense, out, alone, gradient]


def readable_step(count: int, dtype: torch.dtype, out_dtype: torch.dtype, x_before: float, x: float) -> list[Tensor]:
    before, dense, mask, kept = problem(count, dtype)
    values = values_of(mask)
    followed = scaled_step(dense, before, effective_mask(values, kept, x_before))
    out = published(followed, effective_mask(values, kept, x)).to(out_dtype)
    return [followed, out, out, torch.where(kept, followed, 0.0).to(out_dtype)]


def assert_same_bits(fast: list[Tensor], slow: list[Tensor]) -> None:
    for ours, expected in zip(fast, slow, strict=True):
        assert torch.equal(ours, expected) and torch.equal(ours.signbit(), expected.signbit())


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("aliased", [False, True])
def test_a_soft_step_is_the_readable_one(arguments: tuple[int, torch.dtype, torch.dtype], aliased: bool) -> None:
    """W' may be the memory of the master, where that has W's dtype."""
    aliased &= arguments[2] == torch.float32
    for x_before, x in ((1.0, 1.0), (0.7, 0.6), (0.4, 0.3), (0.1, 0.0), (0.0, 0.0)):
        assert_same_bits(fast_step(*arguments, x_before, x, aliased), readable_step(*arguments, x_before, x))


def test_a_compiled_step_is_the_readable_one() -> None:
    for arguments in ARGUMENTS:
        for aliased in (False, arguments[2] == torch.float32):
            with fusing.compiled(True):
                fast = fast_step(*arguments, 0.7, 0.6, aliased)
            assert_same_bits(fast, readable_step(*arguments, 0.7, 0.6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_binary_publication_is_the_readable_one(dtype: torch.dtype) -> None:
    dense = torch.randn(1003)
    effective = (torch.rand(1003) * 2 - 0.5).clamp(0, 1)
    out = torch.full((1003,), 9.0, dtype=dtype)
    publish(dense, effective, out)
    assert_same_bits([out], [published(dense, effective).to(dtype)])
