"""Publication of weights in one pass over flat partitions (`mask.effective_mask`; eqs. 1, 10 and 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.kernels.bits import keep_in_place, octets, values_of_bits
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.codes import values_of
from sparseforge_ds.mask.kernels.exact_lerp import exact_lerp, exact_lerp_elementwise, split_lerp, without_sign
from sparseforge_ds.mask.kernels.fusing import fused


def publish(dense: Tensor, effective: Tensor, out: Tensor) -> None:
    """Write `effective_mask.published` into `out`.

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


def soft_step(
    dense: Tensor, before: Tensor, mask: Tensor, kept: Tensor, x_before: float, x: float, out: Tensor
) -> None:
    """Let W keep its share of an optimizer's step (`effective_mask.scaled_step`), and publish into `out`.

    It computes no top N: `kept` holds it from one update to the next.

    Args:
        dense: (n,) fp32 W after the optimizer's step; overwritten by W after its share of that step.
        before: (n,) fp32 W' before it: `out` itself, or a separate tensor.
        mask: (n,) soft mask, fp32 or codes; 0 in the padding of a partition.
        kept: (ceil(n / 8),) packed bits of the top N of `mask`.
        x_before: x of the step before, at which the gradient was taken.
        x: x of this step.
        out: (n,) master weight, fp32 or bf16.
    """
    # A compiled function must not get the same memory twice.
    is_out = before.untyped_storage()._cdata == out.untyped_storage()._cdata
    for chunk in chunks(dense, in_place=True):  # of a multiple of 8 elements
        old = None if is_out else before[chunk]
        shares = [*split_lerp(x_before), *split_lerp(x)]
        _soft_step(dense[chunk], old, mask[chunk], kept[octets(chunk)], shares, out[chunk])


def soft_publish(dense: Tensor, mask: Tensor, kept: Tensor, x: float, out: Tensor) -> None:
    """Publish as `soft_step` does, without a step before."""
    for chunk in chunks(dense, in_place=True):
        _soft_publish(dense[chunk], mask[chunk], kept[octets(chunk)], split_lerp(x), out[chunk])


def masked_gradient(gradient: Tensor, kept: Tensor) -> None:
    """Write +0.0 in place where a weight is pruned.

    Args:
        gradient: (n,) of any dtype.
        kept: (ceil(n / 8),) packed bits.
    """
    for chunk in chunks(gradient, in_place=True):
        keep_in_place(gradient[chunk], kept[octets(chunk)])


@fused(writes=("dense", "out"))
def _soft_step(
    dense: Tensor, before: Tensor | None, mask: Tensor, kept: Tensor, shares: list[float], out: Tensor
) -> None:
    """Do `soft_step` on a chunk; `shares` is `split_lerp` of x_before, then of x. `before` None: `out` holds W'."""
    soft = values_of(mask)
    hard = values_of_bits(kept, mask.numel())
    nearer_before, offset_before, nearer, offset = shares
    # eq. 10, as the gradient saw it and as it is now
    effective_before = exact_lerp(hard, soft, nearer_before, offset_before)
    effective = exact_lerp(hard, soft, nearer, offset)
    followed = exact_lerp_elementwise(out if before is None else before, dense, effective_before)
    dense.copy_(followed)
    # eq. 1
    out.copy_(without_sign(followed * effective))


@fused(writes=("out",))
def _soft_publish(dense: Tensor, mask: Tensor, kept: Tensor, share: list[float], out: Tensor) -> None:
    nearer, offset = share
    effective = exact_lerp(values_of_bits(kept, mask.numel()), values_of(mask), nearer, offset)
    out.copy_(without_sign(dense * effective))
