"""SparseGPT's layer-wise pruning (arXiv 2301.00774, section 3, algorithm 1, with n:m groups as in section 3.4).

Columns are decided from left to right. The score of a group's member is w^2 / [H^-1]_jj, where H covers the columns
that are not decided yet. Columns to the right of a pruned weight make up for what it took from the layer's output.

Legend of shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.kernels.groups import top_n

BLOCK_COLUMNS = 128
"""Columns whose errors are passed on to later columns at a time. Another number changes rounding alone."""


def reconstruct(weight_OI: Tensor, gram_II: Tensor, n: int, m: int, damping: float) -> tuple[Tensor, Tensor]:
    """Prune one linear layer to n:m and update what is kept.

    Args:
        weight_OI: (out, in) fp32.
        gram_II: (in, in) sum of x x^T over the calibration tokens; all zeros when there were none, which prunes by
            magnitude and updates nothing.
        n: members of a group to keep.
        m: members of a group.
        damping: added to the diagonal, relative to its mean.

    Returns:
        (out, in) fp32 updated weights, pruned ones 0, and (out, in) bool of those that are kept.
    """
    weight_OI = weight_OI.clone()
    # Without any input, prune by magnitude and make up for nothing.
    kept_OI = torch.empty_like(weight_OI, dtype=torch.bool)
    if not gram_II.any():
        kept_OI = top_n(weight_OI.abs().reshape(-1, m), n).view_as(weight_OI)
        return torch.where(kept_OI, weight_OI, 0.0), kept_OI
    # Column by column, a block at a time: choose groups, and pass the errors on to the right.
    upper_II = _factor(gram_II, damping).float()
    weight_OI[:, gram_II.diagonal() == 0] = 0.0
    inputs = weight_OI.shape[1]
    block = max(m, BLOCK_COLUMNS - BLOCK_COLUMNS % m)
    for start in range(0, inputs, block):
        stop = min(start + block, inputs)
        part_OB = weight_OI[:, start:stop]
        factor_BB = upper_II[start:stop, start:stop]
        error_OB = torch.empty_like(part_OB)
        for i in range(stop - start):
            if i % m == 0:
                score = (part_OB[:, i : i + m] / factor_BB.diagonal()[i : i + m]).square()
                kept_OI[:, start + i : start + i + m] = top_n(score, n)
            error_OB[:, i] = torch.where(kept_OI[:, start + i], 0.0, part_OB[:, i]) / factor_BB[i, i]
            part_OB[:, i:] -= error_OB[:, i, None] * factor_BB[i, i:]
        weight_OI[:, stop:] -= error_OB @ upper_II[start:stop, stop:]
    return torch.where(kept_OI, weight_OI, 0.0), kept_OI


def _factor(gram_II: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor U of H^-1 = U^T U in fp64: row j / U_jj spreads column j's error.

    At least one input must be nonzero somewhere.
    """
    hessian_II = gram_II.to(torch.float64, copy=True)
    diagonal = hessian_II.diagonal()
    # Inputs that are always 0 get the mean of the others, so that damping is relative to these alone.
    is_dead = diagonal == 0
    diagonal[is_dead] = diagonal.sum() / (~is_dead).sum()
    diagonal += damping * diagonal.mean()
    # In place, as each matrix of a wide layer takes gigabytes. H is symmetric, and LAPACK works on columns.
    columns_II = hessian_II.mT
    lower_II = torch.linalg.cholesky(columns_II, out=columns_II)
    inverse_II = torch.cholesky_inverse(lower_II, out=lower_II)
    factor_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True, out=inverse_II)
    return factor_II
