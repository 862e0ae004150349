"""Row and column sums of every matrix of a weight, however its elements are cut over the ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.zero.matrices import Matrices
from sparseforge_ds.zero.shard import Shard

# (shape, stacked): an expert's gate and up lie end to end. Rows of 5 and 7, so that nearly every cut is inside of one.
WEIGHTS: dict[str, tuple[tuple[int, ...], int]] = {
    "experts.gate_up_proj": ((3, 4, 5), 2),
    "experts.down_proj": ((3, 5, 7), 1),
    "q_proj.weight": ((6, 5), 1),
}
CUTS = {
    "one rank": {name: [] for name in WEIGHTS},
    "in a row": {name: [13, 47] for name in WEIGHTS},
    "all over": {name: [1, 9, 11, 20, 21, 33, 58] for name in WEIGHTS},
    "with an empty shard": {name: [0, 17, 17, 29] for name in WEIGHTS},
}


def full(name: str) -> Tensor:
    """Not exact in fp32, and of both signs."""
    shape, _ = WEIGHTS[name]
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=generator)


def literal(name: str) -> list[tuple[list[float], list[float]]]:
    """(row sums, column sums) of each matrix."""
    shape, stacked = WEIGHTS[name]
    results = []
    for expert_OI in full(name).view(-1, *shape[-2:]).tolist():
        rows = shape[-2] // stacked
        for first in range(0, shape[-2], rows):
            matrix = expert_OI[first : first + rows]
            results.append(
                ([math.fsum(row) for row in matrix], [math.fsum(column) for column in zip(*matrix, strict=True)])
            )
    return results


def of_rank(cuts: dict[str, list[int]], rank: int) -> tuple[AxisSums, dict[str, Shard]]:
    """Return the sums that a rank adds, on a layout that adds nothing of other ranks."""
    layout: Any = SimpleNamespace(device=torch.device("cpu"), replicated=True, sum_shards=lambda table: table)
    shards = {}
    counts = {}
    for name, (shape, stacked) in WEIGHTS.items():
        size = math.prod(shape)
        bounds = [0, *(min(cut, size) for cut in cuts[name]), size]
        shards[name] = Shard(name, shape, bounds[rank], bounds[rank + 1], flat=0, offset=0)
        counts[name] = stacked * math.prod(shape[:-2])
    sums = AxisSums(Matrices(layout, shards, counts), shards, torch.device("cpu"))
    sums.add_shards(lambda shard: full(shard.name).view(-1)[shard.start : shard.stop])
    return sums, shards


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_sums_of_all_ranks_are_those_of_every_matrix(cuts: dict[str, list[int]]) -> None:
    ranks = [of_rank(cuts, rank)[0] for rank in range(len(next(iter(cuts.values()))) + 1)]
    total = ranks[0]
    for other in ranks[1:]:
        total.values += other.values
    assert total.values.numel() == 6 * (2 + 5) + 3 * (5 + 7) + (6 + 5)
    for name in WEIGHTS:
        expected = literal(name)
        assert len(total.matrices.rows[name]) == len(expected)
        for matrix, (rows, columns) in zip(total.matrices.rows[name], expected, strict=True):
            row_R, column_C = total.matrix_sums(matrix)
            assert row_R.tolist() == pytest.approx(rows, abs=1e-12)
            assert column_C.tolist() == pytest.approx(columns, abs=1e-12)


def test_the_first_element_of_a_part_is_counted_in_its_own_matrix() -> None:
    """Matrix 1 of the stacked experts begins at element 10, and the second shard at element 13."""
    sums, shards = of_rank(CUTS["in a row"], 1)
    parts = sums.matrices.slices["experts.gate_up_proj"]
    assert [part.row for part in parts] == [1, 2, 3, 4]
    assert [part.first for part in parts] == [3, 0, 0, 0]
    values = full("experts.gate_up_proj").view(-1)
    for part in parts:
        source = values[shards["experts.gate_up_proj"].start :][part.inside]
        matrix = values.view(-1, 10)[part.row]
        assert torch.equal(source, matrix[part.first : part.first + part.numel])
