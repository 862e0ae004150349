"""Matrices, masks and curvatures that the tests of the equations and of their fast forms share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.factored import rank_one, shares
from sparseforge_ds.mask.kernels.codes import CODE, stored_as
from sparseforge_ds.mask.kernels.scores import Curvature, RankOne
from sparseforge_ds.mask.pattern import NM, Block, Pattern

DIALS = Dials(0.3, 0.4, 0.7, 0.5, 0.3, x=1.0)
PATTERNS: list[tuple[Pattern, tuple[int, int], int, str]] = [
    (NM(2, 4), (6, 20), -1, "product"),
    (NM(2, 4), (8, 13), -2, "elements"),
    (NM(1, 4), (5, 12), -1, "none"),
    (NM(4, 8), (3, 40), -1, "elements"),
    (NM(3, 5), (3, 25), -1, "product"),
    (NM(4, 4), (3, 20), -1, "product"),
    (NM(8, 32), (3, 64), -1, "product"),
    (NM(8, 32), (64, 3), -2, "elements"),
    (Block(16), (32, 48), -1, "product"),
    (Block(4), (8, 12), -2, "elements"),
    (Block(4), (8, 12), -1, "none"),
]
"""Pattern, shape of a weight, its input axis, and the kind of its curvature."""


def problem(
    shape: tuple[int, int], kind: str, dtype: torch.dtype = torch.float32, ties: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Curvature]:
    """Return weights, mask and curvature; with ties, of a few values each."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    dense, mask, h = (torch.rand(count, generator=generator) for _ in range(3))
    if ties:
        dense, mask, h = ((value * 3).floor() / 3 for value in (dense, mask, h))
    curvature: Curvature = None
    if kind == "elements":
        curvature = h - 0.2
    elif kind == "product":
        h_RC = h.view(shape).double()
        factors = shares(torch.cat([h_RC.sum(1), h_RC.sum(0)]), torch.tensor([shape]))
        curvature = RankOne(*factors.split(shape), 0)
    return dense - 0.5, stored_as(mask, dtype), curvature


def elements_of(curvature: Curvature, count: int) -> Tensor | None:
    """Return H of every element."""
    if isinstance(curvature, RankOne):
        return rank_one(curvature.share_R, curvature.column_C, curvature.first, curvature.first + count)
    return curvature


STORAGES = [torch.float32, CODE]
