"""Importance of a weight: score and per-matrix standardization (SparseForge, arXiv 2605.06402; design eqs. 3 and 4).

The statistics of a matrix are sums over all its elements on all ranks. They are arranged so that *one* reduction of a
(matrices, 7) table serves everything, although eps is relative to a mean that is itself only known after the reduction:
the score is linear in that mean, so its first two moments follow from products that need no mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseforge_ds.mask.chunks import chunks
from sparseforge_ds.mask.factored import rank_one
from sparseforge_ds.mask.fusing import fused, row_sums

STATS = 7
"""Columns of `score_stats`: count, H, H W^2, W^2, (H W^2)^2, H W^4, W^4."""

STD_EPS = 1e-6
"""eps of eq. 4, relative to the std of the matrix."""


class RankOne(NamedTuple):
    """H of consecutive elements of an (R, C) matrix that is a product."""

    share_R: Tensor
    """(R,) fp32, see `shares`."""
    column_C: Tensor
    """(C,) fp32."""
    first: int
    """First flat element of the matrix."""


Curvature = Tensor | RankOne | None
"""H of (n,) elements: fp32 and signed, as a product, or None for plain magnitude (H = 1)."""


def part_of(curvature: Curvature, inside: slice) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """H of some of the elements, as fused functions take it: elements, or share, column and first."""
    if isinstance(curvature, RankOne):
        return None, curvature.share_R, curvature.column_C, curvature.first + inside.start
    return None if curvature is None else curvature[inside], None, None, 0


def score_stats(dense: Tensor, curvature: Curvature) -> Tensor:
    """Partial sums of one matrix, to be added over the shards and ranks that hold it.

    Args:
        dense: (n,) fp32 weights of this shard.
        curvature: of these elements.

    Returns:
        (7,) fp64, see STATS.
    """
    found = []
    for chunk in chunks(dense):
        sums = _sum_moments(dense[chunk], *part_of(curvature, chunk)).sum(dim=1)
        count = sums.new_full((1,), dense[chunk].numel())
        square, fourth = sums[:1], sums[-1:]
        ones = (count, count, square, square, fourth, fourth, fourth)  # H = 1
        found.append(torch.cat(ones if curvature is None else (count, sums)))
    if len(found) == 1:
        return found[0]
    return torch.stack(found).sum(0) if found else dense.new_zeros(STATS, dtype=torch.float64)


def magnitude_stats(moments: Tensor) -> Tensor:
    """(rows, 7) as `score_stats` gives them -> what it gives for the same matrices without a curvature (H = 1)."""
    count, square, fourth = moments[:, 0], moments[:, 3], moments[:, 6]
    return torch.stack([count, count, square, square, fourth, fourth, fourth], dim=1)


@fused()
def _sum_moments(
    dense: Tensor, elements: Tensor | None, share_R: Tensor | None, column_C: Tensor | None, first: int
) -> Tensor:
    """(6, rows) fp64, or (2, rows) where H = 1."""
    if share_R is not None and column_C is not None:
        elements = rank_one(share_R, column_C, first, first + dense.numel())
    square = dense.double().square()
    if elements is None:
        return row_sums([square, square.square()])
    positive = elements.double().clamp(min=0)
    obd = positive * square
    return row_sums([positive, obd, square, obd.square(), obd * square, square.square()])


def scalings(moments: Tensor, damping: float) -> Tensor:
    """Reduced moments of all matrices -> their scalings, without a host sync.

    Args:
        moments: (matrices, 7) fp64, summed over all ranks.
        damping: eps of eq. 3, relative to the mean curvature of the matrix.

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
    inverse = torch.where(spread, variance.clamp(min=torch.finfo(torch.float64).tiny).rsqrt() / (1 + STD_EPS), 0.0)
    return torch.stack([absolute, mean, inverse], dim=1)


def standardized_score(dense: Tensor, curvature: Curvature, scaling: Tensor) -> Tensor:
    """s~ of eq. 4 for elements of one matrix.

    Args:
        dense: (n,) fp32.
        curvature: of these elements.
        scaling: (3,) fp64, one row of `scalings`.

    Returns:
        (n,) fp32.
    """
    found = [_score_chunk(dense[chunk], *part_of(curvature, chunk), scaling) for chunk in chunks(dense)]
    return found[0] if len(found) == 1 else torch.cat([dense.new_empty(0), *found])


@fused()
def _score_chunk(
    dense: Tensor,
    elements: Tensor | None,
    share_R: Tensor | None,
    column_C: Tensor | None,
    first: int,
    scaling: Tensor,
) -> Tensor:
    if share_R is not None and column_C is not None:
        elements = rank_one(share_R, column_C, first, first + dense.numel())
    return score(dense, elements, scaling)


def score(dense: Tensor, elements: Tensor | None, scaling: Tensor) -> Tensor:
    """(...) fp32 s~, computed in fp64 before the last rounding, so that two ranks which share a group agree.

    Args:
        dense: (...) fp32.
        elements: (...) fp32 signed H, or None for plain magnitude.
        scaling: (3,) fp64, one row of `scalings`.
    """
    absolute, mean, inverse = scaling.unbind(0)
    square = dense.double().square()
    curved = 1 + absolute if elements is None else elements.double().clamp(min=0) + absolute
    return ((curved * square - mean) * inverse).float()
