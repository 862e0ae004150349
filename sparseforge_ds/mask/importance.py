"""Importance of a weight: score and per-matrix standardization (SparseForge, arXiv 2605.06402; eqs. 3 and 4).

The statistics of a matrix are sums over all its elements on all ranks, and one reduction of a (matrices, 7) table gives
them. eps depends on the mean of H, which is known only after that reduction; but mean and variance of (H + eps) W^2
follow from seven sums without eps.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOMENTS = 7
"""Columns of `score_moments`: count, H, H W^2, W^2, (H W^2)^2, H W^4, W^4."""

STD_EPS = 1e-6
"""eps of eq. 4, relative to the std of the matrix."""


def score(dense: Tensor, curvature: Tensor | None, damping: Tensor) -> Tensor:
    """Return s = (max(H, 0) + eps) W^2, eq. 3.

    Args:
        dense: (...) fp32 W.
        curvature: (...) fp32 signed H; None is plain magnitude, H = 1.
        damping: () fp64 eps.

    Returns:
        (...) fp64, so that two ranks which share a group agree.
    """
    damped = 1 + damping if curvature is None else curvature.double().clamp(min=0) + damping
    return damped * dense.double().square()


def standardize(score: Tensor, mean: Tensor, inverse_std: Tensor) -> Tensor:
    """Return s~ = (s - mean) / std, eq. 4: (...) fp64 -> (...) fp32."""
    return ((score - mean) * inverse_std).float()


def standardized_score(dense: Tensor, curvature: Tensor | None, scaling: Tensor) -> Tensor:
    """Return s~ of elements of one matrix, eqs. 3 and 4.

    Args:
        dense: (...) fp32 W.
        curvature: (...) fp32 signed H, or None for plain magnitude.
        scaling: (3,) fp64, one row of `scalings`.

    Returns:
        (...) fp32.
    """
    damping, mean, inverse_std = scaling.unbind(0)
    return standardize(score(dense, curvature, damping), mean, inverse_std)


def score_moments(dense: Tensor, curvature: Tensor | None) -> Tensor:
    """Return (7,) fp64 partial sums of one matrix (see MOMENTS), to be added over the shards and ranks that hold it.

    Args:
        dense: (n,) fp32 weights of this shard.
        curvature: (n,) fp32 signed H, or None for plain magnitude.
    """
    square = dense.double().square()
    positive = torch.ones_like(square) if curvature is None else curvature.double().clamp(min=0)
    obd = positive * square  # the score of optimal brain damage, H W^2
    products = (torch.ones_like(square), positive, obd, square, obd.square(), obd * square, square.square())
    return torch.stack([product.sum() for product in products])


def magnitude_moments(moments: Tensor) -> Tensor:
    """Turn (matrices, 7) of `score_moments` into those of the same matrices without a curvature (H = 1)."""
    count, _, _, square, _, _, fourth = moments.unbind(1)
    return torch.stack([count, count, square, square, fourth, fourth, fourth], dim=1)


def scalings(moments: Tensor, damping: float) -> Tensor:
    """Return the damping, mean and 1 / std of every matrix's scores, without a host sync.

    Args:
        moments: (matrices, 7) fp64, summed over all ranks.
        damping: eps of eq. 3, relative to the mean curvature of the matrix.

    Returns:
        (matrices, 3) fp64: absolute damping, mean and 1 / std of the score. A matrix of constant score gets
        1 / std = 0.
    """
    count, curvature, obd, square, obd2, obd_square, fourth = moments.unbind(1)
    # The moments of (H + eps) W^2, multiplied out.
    absolute = damping * curvature / count
    mean = (obd + absolute * square) / count
    second = (obd2 + 2 * absolute * obd_square + absolute.square() * fourth) / count
    variance = (second - mean.square()).clamp_(min=0)
    # Below the rounding noise of the subtraction there is no spread to divide by.
    has_spread = variance > 1e-14 * second
    inverse_std = variance.clamp(min=torch.finfo(torch.float64).tiny).rsqrt() / (1 + STD_EPS)
    return torch.stack([absolute, mean, torch.where(has_spread, inverse_std, 0.0)], dim=1)
