"""Updates of 2:4 masks, whole partitions in one Triton kernel each, however many matrices lie in one (`tile_programs`).

A table of tiles, made once, says which consecutive elements of which matrix a program works on. In Triton's
interpreter the kernels give the bits of `update.update_mask`, `importance.standardized_score` and
`publication.soft_publish`; on a GPU an exponential may round otherwise, and a code differ by 1. Sums have another
order. The kernels are operators of torch for the reasons that `fusing` gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.importance import MOMENTS
from sparseforge_ds.mask.kernels.exact_lerp import split_lerp
from sparseforge_ds.mask.kernels.fusing import TRITON_OPTIONS, has_triton, launches
from sparseforge_ds.mask.pattern import NM, Pattern

TILE = 2048
"""Weights of a tile at most."""
ALIGNMENT = 8
"""Elements that tiles begin and end at a multiple of: whole groups, and whole bytes of packed bits."""
SUMS = 4
"""Sums that an update gives: m (1 - m), m, changed bits of the target, groups where 1[m > 0.5] differs."""
_ROWS_AT_ONCE = 64
"""Rows of sums that a program adds up at a time."""


class MatrixRun(NamedTuple):
    """Consecutive elements of one matrix in a partition."""

    matrix: int
    """Row of the matrix in tables of all matrices."""
    first: int
    """Index of the first element in the flat matrix."""
    offset: int
    """Position of the first element in the partition."""
    elements: int
    """Number of elements."""

    @property
    def tiles(self) -> int:
        """Number of tiles that it is cut into."""
        return -(-self.elements // TILE)

    @property
    def is_aligned(self) -> bool:
        """True if tiles of it are whole groups and whole bytes of bits; rows are whole groups, as 2:4 says."""
        return not (self.first % 4 or self.offset % ALIGNMENT or self.elements % ALIGNMENT)


def can_tile(pattern: Pattern, device: torch.device) -> bool:
    """Return True if these kernels update masks of a pattern on a device: 2:4 on a GPU, or in Triton's interpreter."""
    return pattern == NM(2, 4) and has_triton(device)


def cut_into_tiles(runs: Iterable[MatrixRun]) -> Tensor:
    """Return (tiles, 4) int64, a row as `MatrixRun` for each tile, on the CPU."""
    rows = [torch.empty(0, 4, dtype=torch.int64)]
    for run in runs:
        begin = torch.arange(0, run.elements, TILE)
        matrix = torch.full_like(begin, run.matrix)
        count = (run.elements - begin).clamp(max=TILE)
        rows.append(torch.stack([matrix, run.first + begin, run.offset + begin, count], dim=1))
    return torch.cat(rows)


class TiledCurvature(NamedTuple):
    """H of all matrices, as tiles take it."""

    factors: Tensor
    """(n,) fp32 factors of all matrices, see `factored.shares`."""
    bounds: Tensor
    """(matrices, 3) int64: where its row factors and its column factors begin, and its columns."""
    is_measured: Tensor
    """(matrices,) bool: H is the product of its factors; else it is 1, and the score the magnitude."""


class TiledPartition(NamedTuple):
    """Tensors of one partition that an update reads and writes, laid out alike."""

    dense: Tensor
    """(n,) fp32 W."""
    mask: Tensor
    """(n,) codes, overwritten."""
    target: Tensor
    """(ceil(n / 8),) packed bits of the last update's target, overwritten."""
    kept: Tensor
    """(ceil(n / 8),) packed bits of the top N of the mask, overwritten."""
    master: Tensor
    """(n,) published weight, overwritten."""


def new_moments(tiles: Tensor) -> Tensor:
    """Return (tiles, 8) fp64 without values, of which the first 7 columns are for `importance.MOMENTS`."""
    return torch.empty(len(tiles), MOMENTS + 1, dtype=torch.float64, device=tiles.device)


def sum_moments(dense: Tensor, curvature: TiledCurvature, tiles: Tensor, sums: Tensor) -> None:
    """Write the moments of each tile of a partition to its row of `sums`, see `new_moments`."""
    if len(tiles):
        _tile_moments(dense, *curvature, tiles, sums)


def add_moments(sums: Tensor, segments: Tensor) -> Tensor:
    """Return (matrices, 7) fp64 moments, added over the tiles of each in an order that is always the same.

    Args:
        sums: (tiles, 8) fp64, see `sum_moments`.
        segments: (matrices, 2) int64: first and last tile of each, the latter exclusive.
    """
    totals = torch.empty(len(segments), MOMENTS, dtype=torch.float64, device=sums.device)
    _tile_totals(sums, segments, totals)
    return totals


def update_partition(
    partition: TiledPartition,
    curvature: TiledCurvature,
    scaling: Tensor,
    tiles: Tensor,
    dials: Dials,
    midpoint: bool,
    sums: Tensor,
) -> None:
    """Move the masks of all tiles of a partition, and publish the weights under them.

    Args:
        partition: its tensors.
        curvature: H of all matrices.
        scaling: (matrices, 3) fp64, see `importance.scalings`.
        tiles: (tiles, 4) of this partition.
        dials: the annealed numbers at this step.
        midpoint: see `mask.update.threshold`.
        sums: (tiles, 4) fp32, overwritten, see `SUMS`.
    """
    pull = dials.penalty_rate * dials.mid_penalty
    rates = [dials.temperature, *split_lerp(dials.beta), pull, *split_lerp(dials.mask_rate), *split_lerp(dials.x)]
    if len(tiles):
        _tile_update(*partition, *curvature, scaling, tiles, sums, rates, midpoint)


@launches(writes=("sums",), unread=("sums",))
def _tile_moments(
    dense: Tensor, factors: Tensor, bounds: Tensor, is_measured: Tensor, tiles: Tensor, sums: Tensor
) -> None:
    from sparseforge_ds.mask.kernels import tile_programs

    with torch.cuda.device(dense.get_device()):
        tile_programs.moments[(len(tiles),)](
            dense, factors, is_measured.view(torch.uint8), tiles, bounds, sums, N=TILE // 4, **TRITON_OPTIONS
        )


@launches(writes=("totals",), unread=("totals",))
def _tile_totals(sums: Tensor, segments: Tensor, totals: Tensor) -> None:
    from sparseforge_ds.mask.kernels import tile_programs

    with torch.cuda.device(sums.get_device()):
        tile_programs.add_up[(len(totals),)](sums, segments, totals, ROWS=_ROWS_AT_ONCE, **TRITON_OPTIONS)


@launches(writes=("mask", "target", "kept", "master", "sums"), unread=("kept", "master", "sums"))
def _tile_update(
    dense: Tensor,
    mask: Tensor,
    target: Tensor,
    kept: Tensor,
    master: Tensor,
    factors: Tensor,
    bounds: Tensor,
    is_measured: Tensor,
    scaling: Tensor,
    tiles: Tensor,
    sums: Tensor,
    rates: list[float],
    midpoint: bool,
) -> None:
    from sparseforge_ds.mask.kernels import tile_programs

    with torch.cuda.device(dense.get_device()):
        tile_programs.update[(len(tiles),)](
            dense,
            mask,
            target,
            kept,
            master,
            factors,
            is_measured.view(torch.uint8),
            scaling,
            tiles,
            bounds,
            sums,
            *rates,
            MIDPOINT=midpoint,
            N=TILE // 4,
            **TRITON_OPTIONS,
        )
