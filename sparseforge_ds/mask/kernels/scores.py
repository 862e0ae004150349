"""Moments and standardized scores of many elements, for each form of their curvature (`mask.importance`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseforge_ds.mask import importance
from sparseforge_ds.mask.factored import rank_one
from sparseforge_ds.mask.importance import MOMENTS
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.fusing import fused, row_sums


class RankOne(NamedTuple):
    """H of consecutive elements of an (R, C) matrix as a product of two vectors, which kernels form by chunks."""

    share_R: Tensor
    """(R,) fp32, see `factored.shares`."""
    column_C: Tensor
    """(C,) fp32."""
    first: int
    """Index in the flat matrix of the first of these elements."""


Curvature = Tensor | RankOne | None
"""H of (n,) elements: fp32 and signed, as a product, or None for plain magnitude (H = 1)."""


class CurvatureSlice(NamedTuple):
    """H of some elements, as fused functions take it."""

    numbers: list[Tensor]
    """Nothing for plain magnitude, H of each element, or the factors of `RankOne`."""
    first: int
    """Index in the flat matrix of the first of these elements, if H is a product; else 0."""


def curvature_slice(curvature: Curvature, inside: slice) -> CurvatureSlice:
    """Return H of the elements of a slice."""
    if isinstance(curvature, RankOne):
        return CurvatureSlice([curvature.share_R, curvature.column_C], curvature.first + inside.start)
    return CurvatureSlice([] if curvature is None else [curvature[inside]], 0)


def curvature_elements(numbers: list[Tensor], first: int, count: int) -> Tensor | None:
    """Return (count,) H of a `CurvatureSlice`, inside a fused function; None for plain magnitude."""
    if len(numbers) == 2:
        return rank_one(numbers[0], numbers[1], first, first + count)
    return numbers[0] if numbers else None


def score_moments(dense: Tensor, curvature: Curvature) -> Tensor:
    """Return `importance.score_moments` of (n,) elements: (7,) fp64."""
    parts = []
    for chunk in chunks(dense):
        sums = _sum_moments(dense[chunk], *curvature_slice(curvature, chunk)).sum(dim=1)
        count = sums.new_full((1,), dense[chunk].numel())
        if curvature is None:
            square = sums[:1]
            fourth = sums[1:]
            parts.append(torch.cat((count, count, square, square, fourth, fourth, fourth)))
        else:
            parts.append(torch.cat((count, sums)))
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts).sum(0) if parts else dense.new_zeros(MOMENTS, dtype=torch.float64)


scalings = fused()(importance.scalings)


def standardized_score(dense: Tensor, curvature: Curvature, scaling: Tensor) -> Tensor:
    """Return `importance.standardized_score` of (n,) elements: (n,) fp32."""
    parts = [_score_chunk(dense[chunk], *curvature_slice(curvature, chunk), scaling) for chunk in chunks(dense)]
    return parts[0] if len(parts) == 1 else torch.cat([dense.new_empty(0), *parts])


@fused()
def _sum_moments(dense: Tensor, curvature: list[Tensor], first: int) -> Tensor:
    """Return (6, rows) fp64, the moments but the count; (2, rows) of squares and fourth powers where H = 1."""
    elements = curvature_elements(curvature, first, dense.numel())
    square = dense.double().square()
    if elements is None:
        return row_sums([square, square.square()])
    positive = elements.double().clamp(min=0)
    obd = positive * square
    return row_sums([positive, obd, square, obd.square(), obd * square, square.square()])


@fused()
def _score_chunk(dense: Tensor, curvature: list[Tensor], first: int, scaling: Tensor) -> Tensor:
    return importance.standardized_score(dense, curvature_elements(curvature, first, dense.numel()), scaling)
