"""From the soft mask to what multiplies the weight (SparseForge, arXiv 2605.06402, section 3.3; eqs. 1, 10, 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.bits import keep_in_place, values_of_bits
from sparseforge_ds.mask.chunks import chunks
from sparseforge_ds.mask.codes import values_of
from sparseforge_ds.mask.fusing import between, from_nearer, fused, moved, without_sign


def publish(dense: Tensor, effective: Tensor, out: Tensor) -> None:
    """w = m_eff W into `out`, eq. 1, in one fused pass; a pruned weight is +0.0, never -0.0.

    Args:
        dense: (n,) fp32 W.
        effective: (n,) fp32 m_eff.
        out: (n,) master weight that DeepSpeed casts and gathers, fp32 or bf16.
    """
    # 0 + d * m: adding +0.0 turns the -0.0 of a negative dead weight into +0.0 at no extra pass.
    zero = dense.new_zeros(())
    if out.dtype == dense.dtype:
        torch.addcmul(zero, dense, effective, out=out)
    else:
        out.copy_(torch.addcmul(zero, dense, effective))


def is_kept(weights: Tensor) -> Tensor:
    """(n,) bool of weights whose mask is frozen: all but +0.0, since a kept 0 is written as -0.0 in a checkpoint."""
    return (weights != 0) | weights.signbit()


@fused()
def gradient_of_kept(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient with +0.0 where a frozen weight is pruned.

    Args:
        gradient: of any shape and dtype.
        weight: of the same shape, as the forward saw it.
    """
    return gradient.masked_fill(~is_kept(weight), 0.0)


def soft_step(
    dense: Tensor, before: Tensor, mask: Tensor, kept: Tensor, x_before: float, x: float, out: Tensor
) -> None:
    """What follows an optimizer's step from W' to W, in one pass, without a top N: masks move only at an update.

    With m_eff(x) = x m + (1 - x) kept, W <- W' + m_eff(x_before) (W - W') in place, then m_eff(x) W into `out`, +0.0
    where that is 0.

    Args:
        dense: (n,) fp32 W after the optimizer's step.
        before: (n,) fp32 W' before it; `out` itself, or memory of its own.
        mask: (n,) soft mask, fp32 or codes; 0 in the padding of a partition.
        kept: (ceil(n / 8),) packed bits of the top N of `mask`.
        x_before: x of the step before, at which the gradient was taken.
        x: x of this step.
        out: (n,) master weight, fp32 or bf16.
    """
    held = None if before.untyped_storage()._cdata == out.untyped_storage()._cdata else before
    for chunk in chunks(dense, in_place=True):  # of a multiple of 8 elements
        bits = kept[chunk.start // 8 : -(-chunk.stop // 8)]
        # A compiled function must not get the same memory twice.
        given = (dense[chunk], None if held is None else held[chunk], mask[chunk], bits)
        _soft_step(*given, *from_nearer(x_before), *from_nearer(x), out[chunk])


def soft_publish(dense: Tensor, mask: Tensor, kept: Tensor, x: float, out: Tensor) -> None:
    """The second half of `soft_step`: m_eff(x) W into `out`."""
    for chunk in chunks(dense, in_place=True):
        bits = kept[chunk.start // 8 : -(-chunk.stop // 8)]
        _soft_publish(dense[chunk], mask[chunk], bits, *from_nearer(x), out[chunk])


def masked_gradient(gradient: Tensor, kept: Tensor) -> None:
    """Zero in place, +0.0, where a weight is pruned.

    Args:
        gradient: (n,) of any dtype.
        kept: (ceil(n / 8),) packed bits.
    """
    for chunk in chunks(gradient, in_place=True):
        keep_in_place(gradient[chunk], kept[chunk.start // 8 : -(-chunk.stop // 8)])


@fused(writes=("dense", "out"))
def _soft_step(
    dense: Tensor,
    before: Tensor | None,
    mask: Tensor,
    kept: Tensor,
    nearer_before: float,
    way_before: float,
    nearer: float,
    way: float,
    out: Tensor,
) -> None:
    soft, hard = values_of(mask), values_of_bits(kept, mask.numel())
    then, now = between(hard, soft, nearer_before, way_before), between(hard, soft, nearer, way)
    followed = moved(out if before is None else before, dense, then)
    dense.copy_(followed)
    out.copy_(without_sign(followed * now))


@fused(writes=("out",))
def _soft_publish(dense: Tensor, mask: Tensor, kept: Tensor, nearer: float, way: float, out: Tensor) -> None:
    effective = between(values_of_bits(kept, mask.numel()), values_of(mask), nearer, way)
    out.copy_(without_sign(dense * effective))
