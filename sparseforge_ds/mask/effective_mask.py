"""The mask that multiplies the weight (SparseForge, arXiv 2605.06402, section 3.3; eqs. 1, 10, 11).

`kernels.publication` gives the same bits in one pass.
"""

from __future__ import annotations

from torch import Tensor

from sparseforge_ds.mask.interpolation import lerp


def effective_mask(mask: Tensor, kept: Tensor, x: float) -> Tensor:
    """Return m_eff = x m + (1 - x) hard(m), eq. 10.

    Args:
        mask: (n,) fp32 m.
        kept: (n,) bool hard(m), the top N of every group of m.
        x: share of the soft mask: 1 while heating, 0 once frozen (eq. 11).
    """
    return lerp(kept.float(), mask, x)


def published(dense: Tensor, effective: Tensor) -> Tensor:
    """Return w = m_eff W, eq. 1: the only weight that the network sees. A pruned one is +0.0, never -0.0."""
    return dense * effective + 0.0


def scaled_step(dense: Tensor, before: Tensor, effective: Tensor) -> Tensor:
    """Return W' + m_eff (W - W'), where an optimizer's step from W' to W ends if m_eff scales it.

    Args:
        dense: (n,) fp32 W.
        before: (n,) fp32 W'.
        effective: (n,) fp32 m_eff, at which the gradient was taken.
    """
    return lerp(before, dense, effective)
