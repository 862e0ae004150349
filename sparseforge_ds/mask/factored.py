"""Curvature of a matrix from its row and column sums: what is left of a noisy estimate when noise is averaged away.

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
    before, after = start % columns, -(start + values.numel()) % columns
    first = start // columns
    whole_rC = (F.pad(values, (before, after)) if before or after else values).view(-1, columns)
    row_R[first : first + len(whole_rC)] += whole_rC.sum(1, dtype=torch.float64)
    column_C += whole_rC.sum(0, dtype=torch.float64)


def rank_one(row_R: Tensor, column_C: Tensor, start: int, stop: int) -> Tensor:
    """(stop - start,) fp32: elements of max(r, 0) max(c, 0)^T / sum max(r, 0), whose column sums are max(c, 0).

    Zeros where no row has a positive sum. Ranks with equal sums get equal elements.

    Args:
        row_R: (R,) signed row sums of the whole matrix.
        column_C: (C,) signed column sums.
        start: first flat element.
        stop: one past the last.
    """
    positive_R = row_R.clamp(min=0)
    total = positive_R.sum()
    share_R = torch.where(total > 0, positive_R / total, 0.0)
    first, last = _rows(start, stop, column_C.numel())
    product_rC = torch.outer(share_R[first:last].float(), column_C.clamp(min=0).float())
    return _run(product_rC, start, stop)


def vanishes(row_R: Tensor, column_C: Tensor) -> bool:
    """Whether `rank_one` is 0 of a matrix that is not: all row sums, or all column sums, of a finite one are <= 0."""
    both = torch.cat([row_R, column_C])
    one_sided = bool((row_R <= 0).all()) or bool((column_C <= 0).all())
    return one_sided and bool(both.isfinite().all()) and bool(both.any())


def _rows(start: int, stop: int, columns: int) -> tuple[int, int]:
    """First row that the run touches, and one past the last."""
    return start // columns, -(-stop // columns)


def _run(touched_rC: Tensor, start: int, stop: int) -> Tensor:
    """The run's elements of the rows that it touches."""
    first = start % touched_rC.shape[1] if touched_rC.numel() else 0
    return touched_rC.view(-1)[first : first + stop - start]
