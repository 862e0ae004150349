"""Triton kernels of ours beside the readable functions: in Triton's interpreter, and in `test_fused_on_gpu` on a GPU.

TRITON_INTERPRET=1 python -m tests.unit.mask.kernels.interpreted     the variable holds for a whole process
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.mask import importance
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.curvature import fisher_sums
from sparseforge_ds.mask.effective_mask import effective_mask, published
from sparseforge_ds.mask.factored import rank_one, shares
from sparseforge_ds.mask.kernels.bits import pack
from sparseforge_ds.mask.kernels.codes import CODE, decode, encode
from sparseforge_ds.mask.kernels.fisher import InputSquares, add_fisher_sums
from sparseforge_ds.mask.kernels.tiles import (
    SUMS,
    TILE,
    MatrixRun,
    TiledCurvature,
    TiledPartition,
    add_moments,
    cut_into_tiles,
    new_moments,
    sum_moments,
    update_partition,
)
from sparseforge_ds.mask.pattern import NM, top_n
from sparseforge_ds.mask.update import update_mask
from tests.unit.mask.problem import DIALS


class Parts(NamedTuple):
    """Parts of matrices that a rank holds in one partition."""

    shapes: list[tuple[int, int]]
    """Shapes of the whole matrices."""
    runs: list[MatrixRun]
    numel: int
    """Elements of the partition, padding included."""


SMALL = Parts(
    [(24, 40), (130, 36), (64, 128), (3, 8)],
    [
        MatrixRun(0, 200, 8, 680),
        MatrixRun(1, 4, 688, 2 * TILE + 8),
        MatrixRun(2, 0, 5000, 64 * 128),
        MatrixRun(3, 16, 13200, 8),
    ],
    13216,
)
"""Padding lies before, between and behind the parts."""
LARGE = Parts(
    [(576, 576), (1088, 5120), (2048, 8192), (64, 64)],
    [
        MatrixRun(0, 0, 0, 576 * 576),
        MatrixRun(1, 5120, 400000, 1087 * 5120),
        MatrixRun(2, 0, 6000000, 2048 * 8192),
        MatrixRun(3, 0, 23000000, 64 * 64),
    ],
    23004096,
)


class Result(NamedTuple):
    """Results of an update, on the CPU."""

    moments: Tensor
    mask: Tensor
    target: Tensor
    kept: Tensor
    master: Tensor
    sums: Tensor


class Problem:
    """One partition with parts of four matrices, of which the third is scored by magnitude."""

    def __init__(self, parts: Parts = SMALL, ties: bool = False) -> None:
        self.parts = parts
        generator = torch.Generator().manual_seed(int(ties))
        # H of every matrix is the product of its row and column sums.
        extents = torch.tensor(parts.shapes)
        sums = torch.randn(int(extents.sum()), dtype=torch.float64, generator=generator) + 0.5
        self.factors = shares(sums, extents)
        self.bounds = []
        start = 0
        for rows, columns in parts.shapes:
            self.bounds.append((start, start + rows, columns))
            start += rows + columns
        self.is_measured = torch.tensor([True, True, False, True])
        # What lies between the matrices is zero.
        inside = torch.zeros(parts.numel, dtype=torch.bool)
        for run in parts.runs:
            inside[elements_of(run)] = True
        dense = torch.randn(parts.numel, generator=generator)
        dense = (dense * 2).round() if ties else dense
        # Masks have many members at both ends, as those of a run have.
        codes = torch.randint(0, 65536, (parts.numel,), generator=generator)
        codes[::3] = 65535
        codes[1::5] = 0
        self.dense = torch.where(inside, dense, 0.0)
        self.mask = torch.where(inside, codes, 0).to(CODE)
        self.before = pack((torch.rand(parts.numel, generator=generator) > 0.5) & inside)
        # Scores are scaled as a run scales them.
        moments = [importance.score_moments(self.dense[elements_of(run)], self.curvature(run)) for run in parts.runs]
        self.moments = torch.stack(moments)
        self.scaling = importance.scalings(self.moments, 1e-3)

    def curvature(self, run: MatrixRun) -> Tensor | None:
        """Return (count,) H of a run as the readable functions take it."""
        if not self.is_measured[run.matrix]:
            return None
        rows, columns = self.parts.shapes[run.matrix]
        start = self.bounds[run.matrix][0]
        share_R, column_C = self.factors[start : start + rows + columns].split([rows, columns])
        return rank_one(share_R, column_C, run.first, run.first + run.elements)


def elements_of(run: MatrixRun) -> slice:
    return slice(run.offset, run.offset + run.elements)


def readable_update(problem: Problem, dials: Dials, midpoint: bool) -> Result:
    """Update one matrix after the other by the functions of `mask`."""
    target, kept = (torch.zeros(problem.parts.numel, dtype=torch.bool) for _ in range(2))
    mask = problem.mask.clone()
    master = torch.zeros(problem.parts.numel)
    disagreeing = 0
    for run in problem.parts.runs:
        inside = elements_of(run)
        # Equations 3 to 9 on one matrix, by the readable functions.
        curvature = problem.curvature(run)
        h_GM = None if curvature is None else curvature.view(-1, 4)
        dense_GM = problem.dense[inside].view(-1, 4)
        old_GM = decode(mask[inside]).view(-1, 4)
        scaling = problem.scaling[run.matrix]
        new_GM, target_GM = update_mask(dense_GM, old_GM, h_GM, scaling, dials, NM(2, 4), midpoint)
        # The stored mask is rounded, and what follows reads it as it is stored.
        mask[inside] = encode(new_GM).view(-1)
        new_GM = decode(mask[inside]).view(-1, 4)
        kept_GM = top_n(new_GM, 2)
        disagreeing += int(((new_GM > 0.5) != kept_GM).any(dim=1).sum())
        target[inside] = target_GM.view(-1)
        kept[inside] = kept_GM.view(-1)
        master[inside] = published(dense_GM, effective_mask(new_GM, kept_GM, dials.x)).view(-1)
    # Sums as the kernel gives them.
    packed = pack(target)
    m = decode(mask).double()
    flips = ((packed ^ problem.before)[:, None] >> torch.arange(8) & 1).sum()
    sums = torch.tensor([(m * (1 - m)).sum(), m.sum(), flips, disagreeing], dtype=torch.float64)
    return Result(problem.moments, mask, packed, pack(kept), master, sums)


def tiled_update(
    problem: Problem, dials: Dials, midpoint: bool, device: str = "cpu", master_dtype: torch.dtype = torch.float32
) -> Result:
    """Update all matrices at once, on a device."""
    table = cut_into_tiles(problem.parts.runs)
    tiles = table.to(device)
    bounds = torch.tensor(problem.bounds).to(device)
    curvature = TiledCurvature(problem.factors.to(device), bounds, problem.is_measured.to(device))
    target = problem.before.clone().to(device)
    master = torch.zeros(problem.parts.numel, dtype=master_dtype, device=device)
    dense = problem.dense.to(device)
    partition = TiledPartition(dense, problem.mask.clone().to(device), target, torch.zeros_like(target), master)
    # Moments of the tiles, then of the matrices.
    stops = torch.tensor([run.tiles for run in problem.parts.runs]).cumsum(0)
    segments = torch.stack([F.pad(stops, (1, -1)), stops], dim=1).to(device)
    sums_of_tiles = new_moments(tiles)
    sum_moments(dense, curvature, tiles, sums_of_tiles)
    moments = add_moments(sums_of_tiles, segments)
    sums = torch.empty(len(table), SUMS, device=device)
    update_partition(partition, curvature, problem.scaling.to(device), tiles, dials, midpoint, sums)
    results = (moments, *partition[1:], sums.sum(dim=0, dtype=torch.float64))
    return Result(*(result.cpu() for result in results))


def updates_have_the_bits_of_the_readable_functions() -> None:
    for ties, dials, midpoint in (
        (False, DIALS, True),
        (True, DIALS, True),
        (False, replace(DIALS, x=0.2, beta=0.9, mask_rate=0.8), False),
        (False, replace(DIALS, x=0.0, beta=1.0, mask_rate=1.0, temperature=1e-6), True),
        (False, replace(DIALS, x=1.0, beta=0.0, mask_rate=0.0), True),
    ):
        problem = Problem(ties=ties)
        expected = readable_update(problem, dials, midpoint)
        tiled = tiled_update(problem, dials, midpoint)
        torch.testing.assert_close(tiled.moments, expected.moments, rtol=1e-12, atol=0)
        assert torch.equal(tiled.mask, expected.mask)
        assert torch.equal(tiled.target, expected.target) and torch.equal(tiled.kept, expected.kept)
        assert torch.equal(tiled.master.view(torch.int32), expected.master.view(torch.int32))
        torch.testing.assert_close(tiled.sums, expected.sums, rtol=1e-6, atol=1e-3)
        assert torch.equal(tiled.sums[2:], expected.sums[2:])
    # A master in bf16 has the upper half of the bits: the interpreter cuts them off where a GPU rounds.
    master = tiled_update(problem, dials, midpoint, master_dtype=torch.bfloat16).master
    assert torch.equal(master.view(torch.int16), (expected.master.view(torch.int32) >> 16).short())


def layer_sums(
    layers: list[tuple[Tensor, Tensor]], factor: float, device: str = "cpu", rows: slice = slice(None)
) -> list[Tensor]:
    """Return fp64 sums by output and by input of each (dL/dy, x), one layer after the other, on the CPU.

    Inputs that are one tensor stay one on the device; `rows` are the tokens of them that are taken.
    """
    moved = {id(x): x.to(device) for _, x in layers}
    squares = InputSquares()
    sums = []
    for grad_TO, input_TI in layers:
        sizes = (grad_TO.shape[1], input_TI.shape[1])
        ones = [torch.ones(size, dtype=torch.float64, device=device) for size in sizes]
        add_fisher_sums(grad_TO.to(device)[rows], moved[id(input_TI)][rows], factor, *ones, squares=squares)
        sums += [part.cpu() for part in ones]
    return sums


def readable_sums(layers: list[tuple[Tensor, Tensor]], factor: float) -> list[Tensor]:
    """Return `layer_sums` by `curvature.fisher_sums`."""
    sums = [part for layer in layers for part in fisher_sums(*layer)]
    return [1 + factor * part.double() for part in sums]


def sums_of_layers_are_those_of_the_readable_function() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TI, other_TI = (torch.randn(70, 96, generator=generator) for _ in range(2))
    layers = [
        (torch.randn(70, outputs, generator=generator), x) for outputs, x in ((40, x_TI), (130, x_TI), (64, other_TI))
    ]
    for ours, expected in zip(layer_sums(layers, 0.25), readable_sums(layers, 0.25), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    # Several blocks of features, in bf16, and a single token.
    for tokens in (70, 1):
        wide_TI = torch.randn(tokens, 600, generator=generator).bfloat16()
        wide = [(torch.randn(tokens, 520, generator=generator).bfloat16(), wide_TI)]
        torch.testing.assert_close(layer_sums(wide, 0.5), readable_sums(wide, 0.5), rtol=1e-5, atol=0)
    # Neither tensor has its features side by side.
    turned = [(torch.randn(40, 70, generator=generator).t(), torch.randn(96, 70, generator=generator).t())]
    torch.testing.assert_close(layer_sums(turned, 0.5), readable_sums(turned, 0.5), rtol=1e-5, atol=0)
    # A gradient of a sum has one number for all, and a layer may have no token at all.
    same = [(torch.ones(1, 1).expand(70, 40), x_TI)]
    torch.testing.assert_close(layer_sums(same, 2.0), readable_sums(same, 2.0), rtol=1e-5, atol=0)
    assert all(part.eq(1).all() for part in layer_sums(layers, 2.0, rows=slice(0)))


def squares_are_of_one_input_as_it_is() -> None:
    squares = InputSquares()
    first, second = (torch.ones(5, 3) for _ in range(2))
    square = torch.full((5,), 3.0)
    assert squares.get(first) is None
    squares.set(first, square)
    assert squares.get(first) is square and squares.get(first.detach()) is square
    assert squares.get(second) is None and squares.get(first[:4]) is None and squares.get(first.t()) is None
    first.mul_(2)
    assert squares.get(first) is None
    squares.set(first, square)
    pointer = first.data_ptr()
    del first
    again = [torch.ones(5, 3) for _ in range(20)]
    assert all(squares.get(x) is None for x in again), pointer


if __name__ == "__main__":
    sums_of_layers_are_those_of_the_readable_function()
    squares_are_of_one_input_as_it_is()
    updates_have_the_bits_of_the_readable_functions()
