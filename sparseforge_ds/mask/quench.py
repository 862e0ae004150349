"""From the soft mask to what multiplies the weight (SparseForge, arXiv 2605.06402, section 3.3; eqs. 1, 10, 11)."""

from __future__ import annotations

import torch
from torch import Tensor


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


def is_kept(weights: Tensor) -> Tensor:
    """(n,) bool of weights whose mask is frozen: all but +0.0, since a kept 0 is written as -0.0 in a checkpoint."""
    return (weights != 0) | weights.signbit()


def disagreement(mask_GM: Tensor, hard_GM: Tensor, theta: float = 0.5) -> Tensor:
    """Groups whose top N is not what the paper's own rule 1[m > theta] would keep.

    Returns:
        () fp64 count, left on the device.
    """
    return ((mask_GM > theta) != hard_GM).any(dim=1).sum(dtype=torch.float64)
