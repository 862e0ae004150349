"""From the soft mask to what multiplies the weight (SparseForge, arXiv 2605.06402, section 3.3; eqs. 1, 10, 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.bits import bits_of
from sparseforge_ds.mask.codes import values_of
from sparseforge_ds.mask.fusing import between, fused
from sparseforge_ds.mask.runs import runs


def effective_mask(mask: Tensor, hard: Tensor, x: float) -> Tensor:
    """m_eff = x m + (1 - x) hard(m), eq. 10.

    Args:
        mask: (n,) fp32 soft mask.
        hard: (n,) bool, the top N of `mask` in every group.
        x: 1 = soft, 0 = hard.
    """
    return torch.lerp(hard.to(mask.dtype), mask, x)


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


def follow(dense: Tensor, before: Tensor, effective: Tensor) -> None:
    """W <- W' + m_eff (W - W') in place: of an optimizer's step, a weight keeps the share that it counts.

    Plain gradient descent on the loss of m_eff W has this factor from the chain rule. Adam divides it out again: pruned
    weights would move as far as the others, by gradients that change nothing, and so would their scores.

    Args:
        dense: (n,) fp32 W after the step.
        before: (n,) fp32 W' before it.
        effective: (n,) fp32 m_eff that the gradient was taken at; where it is 1, W stays as it is.
    """
    for inside in runs(dense):
        torch.lerp(before[inside], dense[inside], effective[inside], out=dense[inside])


def disagreement(mask_GM: Tensor, hard_GM: Tensor, theta: float = 0.5) -> Tensor:
    """Groups whose top N is not what the paper's own rule 1[m > theta] would keep.

    Returns:
        () fp64 count, left on the device.
    """
    return ((mask_GM > theta) != hard_GM).any(dim=1).sum(dtype=torch.float64)


def soft_step(
    dense: Tensor, before: Tensor, mask: Tensor, kept: Tensor, x_before: float, x: float, out: Tensor
) -> None:
    """`follow` and `publish` of an ordinary step in one pass, without a top N: masks move only at an update.

    With m_eff(x) = x m + (1 - x) kept, W <- W' + m_eff(x_before) (W - W') in place, then m_eff(x) W into `out`, +0.0
    where that is 0.

    Args:
        dense: (n,) fp32 W after the optimizer's step.
        before: (n,) fp32 W' before it; may be `out` itself.
        mask: (n,) soft mask, fp32 or codes; 0 in the padding of a partition.
        kept: (ceil(n / 8),) packed bits of the top N of `mask`.
        x_before: x of the step before, at which the gradient was taken.
        x: x of this step.
        out: (n,) master weight, fp32 or bf16.
    """
    held = None if before.data_ptr() == out.data_ptr() else before
    for run in runs(dense):  # of a multiple of 8 elements
        bits = kept[run.start // 8 : -(-run.stop // 8)]
        # A compiled function must not get the same memory twice.
        given = (dense[run], None if held is None else held[run], mask[run], bits)
        _soft_step(*given, x_before, x_before >= 0.5, x, x >= 0.5, out[run])


def masked_gradient(gradient: Tensor, kept: Tensor) -> None:
    """Zero in place, +0.0, where a weight is pruned.

    Args:
        gradient: (n,) of any dtype.
        kept: (ceil(n / 8),) packed bits.
    """
    for run in runs(gradient):
        _masked_gradient(gradient[run], kept[run.start // 8 : -(-run.stop // 8)])


@fused(writes=("dense", "out"))
def _soft_step(
    dense: Tensor,
    before: Tensor | None,
    mask: Tensor,
    kept: Tensor,
    x_before: float,
    late_before: bool,
    x: float,
    late: bool,
    out: Tensor,
) -> None:
    soft, hard = values_of(mask), bits_of(kept, mask.numel()).float()
    then, now = between(hard, soft, x_before, late_before), between(hard, soft, x, late)
    followed = between(out if before is None else before, dense, then)
    published = followed * now
    dense.copy_(followed)
    out.copy_(torch.where(published == 0, 0.0, published))


@fused(writes=("gradient",))
def _masked_gradient(gradient: Tensor, kept: Tensor) -> None:
    gradient.copy_(torch.where(bits_of(kept, gradient.numel()), gradient, 0.0))
