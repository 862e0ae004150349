"""Rank-one curvature of a matrix from its row and column sums, in which the noise of an estimate averages away.

The diagonal of a linear layer's Hessian is close to a product: how much an output matters times how large an input is.
Row and column sums average over hundreds of elements each, while single elements decide who survives in a group.
Adafactor (arXiv 1804.04235, section 3) keeps second moments in the same form.

A shard has a run of consecutive elements of a matrix, which begins and ends anywhere in a row. Legend of shape
suffixes: R rows, C columns, n elements of the run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def add_sums(values: Tensor, start: int, row_R: Tensor, column_C: Tensor) -> None:
    """Add a run's part of all row and column sums, in place.

    Args:
        values: (n,) elements start..start + n of an (R, C) matrix.
        start: first flat element.
        row_R: (R,) fp64.
        column_C: (C,) fp64.
    """
    if not values.numel():
        return
    columns = column_C.numel()
    # Complete the run to whole rows with zeros.
    before = start % columns
    after = -(start + values.numel()) % columns
    first = start // columns
    value_RC = (F.pad(values, (before, after)) if before or after else values).view(-1, columns)
    row_R[first : first + len(value_RC)] += value_RC.sum(1, dtype=torch.float64)
    column_C += value_RC.sum(0, dtype=torch.float64)


def shares(sums: Tensor, extents: Tensor) -> Tensor:
    """Return fp32 factors of `rank_one`: H = max(r, 0) max(c, 0)^T / sum max(r, 0), whose column sums are max(c, 0).

    All matrices lie end to end, each with its row sums before its column sums. The share of a row is 0 where no row of
    its matrix has a positive sum. Ranks with equal sums get equal factors.

    Args:
        sums: (n,) signed sums of whole matrices.
        extents: (matrices, 2) int64 R and C of each, n in all.

    Returns:
        (n,) share of each row, and column sums, all >= 0.
    """
    positive = sums.clamp(min=0)
    divisor = segment_sums(positive, extents)
    divisor[:, 1] = 1  # column sums are as they are
    divisors = divisor.view(-1).repeat_interleave(extents.view(-1), output_size=sums.numel())
    return torch.where(divisors > 0, positive / divisors, 0.0).float()


def segment_sums(sums: Tensor, extents: Tensor) -> Tensor:
    """Return (matrices, 2) totals of each matrix's row sums and column sums, which lie end to end as in `shares`."""
    return torch.segment_reduce(sums, "sum", lengths=extents.view(-1), unsafe=True).view(-1, 2)


def rank_one(share_R: Tensor, column_C: Tensor, start: int, stop: int) -> Tensor:
    """Return (stop - start,) fp32 consecutive elements of an (R, C) matrix that is a product.

    Args:
        share_R: (R,) fp32, see `shares`.
        column_C: (C,) fp32.
        start: first flat element.
        stop: one past the last.
    """
    columns = column_C.numel()
    first = start // columns
    last = (stop + columns - 1) // columns
    return torch.outer(share_R[first:last], column_C).view(-1)[start % columns :][: stop - start]


def vanishes(row_R: Tensor, column_C: Tensor) -> bool:
    """Return True if `rank_one` is 0 although the (finite) matrix is not: all row, or all column, sums are <= 0."""
    sums = torch.cat([row_R, column_C])
    one_sided = bool((row_R <= 0).all()) or bool((column_C <= 0).all())
    return one_sided and bool(sums.isfinite().all()) and bool(sums.any())
