"""Importance of a weight: score and per-matrix standardization (SparseForge, arXiv 2605.06402; design eqs. 3 and 4).

The statistics of a matrix are sums over all its elements on all ranks. They are arranged so that *one* reduction of a
(matrices, 7) table serves everything, although eps is relative to a mean that is itself only known after the reduction:
the score is linear in that mean, so its first two moments follow from products that need no mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.runs import runs

MOMENTS = 7
"""Columns of `score_moments`: count, H, H W^2, W^2, (H W^2)^2, H W^4, W^4."""


def score_moments(dense: Tensor, curvature: Tensor | None) -> Tensor:
    """Partial sums of one matrix, to be added over the shards and ranks that hold it.

    Args:
        dense: (n,) fp32 weights of this shard.
        curvature: (n,) fp32 signed curvature, or None for plain magnitude (H = 1).

    Returns:
        (7,) fp64, see MOMENTS.
    """
    total = torch.zeros(MOMENTS, dtype=torch.float64, device=dense.device)
    for run in runs(dense):
        total += _run_moments(dense[run], None if curvature is None else curvature[run])
    return total


def magnitude_moments(moments: Tensor) -> Tensor:
    """(rows, 7) as `score_moments` gives them -> what it gives for the same matrices without a curvature (H = 1)."""
    count, square, fourth = moments[:, 0], moments[:, 3], moments[:, 6]
    return torch.stack([count, count, square, square, fourth, fourth, fourth], dim=1)


def _run_moments(dense: Tensor, curvature: Tensor | None) -> Tensor:
    square = dense.double().square_()
    count = torch.full((), float(dense.numel()), dtype=torch.float64, device=dense.device)
    if curvature is None:
        total, fourth = square.sum(), square.square().sum()
        return torch.stack([count, count, total, total, fourth, fourth, fourth])
    positive = curvature.double().clamp_(min=0)
    obd = positive * square
    return torch.stack(
        [
            count,
            positive.sum(),
            obd.sum(),
            square.sum(),
            obd.square().sum(),
            (obd * square).sum(),
            square.square().sum(),
        ]
    )


def scalings(moments: Tensor, damping: float, std_eps: float = 1e-6) -> Tensor:
    """Reduced moments of all matrices -> their scalings, without a host sync.

    Args:
        moments: (matrices, 7) fp64, summed over all ranks.
        damping: eps of eq. 3, relative to the mean curvature of the matrix.
        std_eps: eps of eq. 4, relative to the std of the matrix.

    Returns:
        (matrices, 3) fp64: absolute damping, mean and 1 / std of the score. A matrix of constant score gets
        1 / std = 0.
    """
    count, curvature, obd, square, obd2, obd_square, fourth = moments.unbind(1)
    absolute = damping * curvature / count
    mean = (obd + absolute * square) / count
    second = (obd2 + 2 * absolute * obd_square + absolute.square() * fourth) / count
    variance = (second - mean.square()).clamp_(min=0)
    # Below the rounding noise of the subtraction there is no spread to divide by.
    spread = variance > 1e-14 * second
    inverse = torch.where(spread, variance.clamp(min=torch.finfo(torch.float64).tiny).rsqrt() / (1 + std_eps), 0.0)
    return torch.stack([absolute, mean, inverse], dim=1)


def standardized_score(dense: Tensor, curvature: Tensor | None, scaling: Tensor) -> Tensor:
    """s~ of eq. 4 for the elements of one matrix.

    Args:
        dense: (n,) fp32.
        curvature: (n,) fp32 signed, or None for plain magnitude.
        scaling: (3,) fp64, one row of `scalings`.

    Returns:
        (n,) fp32. Computed in fp64 before the last rounding, so that two ranks which share a group agree.
    """
    absolute, mean, inverse = scaling.unbind(0)
    score = torch.empty_like(dense, dtype=torch.float32)
    for run in runs(dense):
        square = dense[run].double().square_()
        if curvature is None:
            obd = square.mul_(1 + absolute)
        else:
            obd = curvature[run].double().clamp_(min=0).add_(absolute).mul_(square)
        score[run] = obd.sub_(mean).mul_(inverse)
    return score
