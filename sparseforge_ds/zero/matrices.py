"""One table of sums with a row for each matrix, so that one reduction sums all of them.

A *matrix* is standardized by itself: a 2-D weight, one expert of a fused 3-D weight, or the gate or up half of an
expert if these are stacked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseforge_ds.zero.halo import Span
from sparseforge_ds.zero.shard import Shard, ShardLayout


@dataclass(frozen=True)
class MatrixSlice:
    """Elements of one matrix that lie in a span: in a shard, or in other consecutive elements of a weight."""

    row: int
    """Row of the matrix in the table."""
    start: int
    """First element, counted from the beginning of the span."""
    stop: int
    """One past the last element, counted likewise."""
    first: int
    """First element, counted from the beginning of the matrix."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def inside(self) -> slice:
        """Range of the elements in the span."""
        return slice(self.start, self.stop)


class Matrices:
    """Rows of the matrices of all prunable weights, and the slices of matrices that each shard holds."""

    def __init__(self, layout: ShardLayout, shards: dict[str, Shard], counts: dict[str, int]) -> None:
        """Number the matrices.

        Args:
            layout: shard map of the engine.
            shards: shards of the prunable weights, by name.
            counts: number of matrices of equal size that lie end to end in each weight, by name.
        """
        self.layout = layout
        self._shapes = {name: shard.shape for name, shard in shards.items()}
        self.names: list[str] = []
        """Name of each row's matrix."""
        self.rows: dict[str, range] = {}
        """Rows of each weight's matrices in the table, by weight name."""
        self.slices: dict[str, list[MatrixSlice]] = {}
        """Slices of matrices in this rank's shard of each weight, by weight name."""
        for name, shard in shards.items():
            count = counts[name]
            first = len(self.names)
            self.rows[name] = range(first, first + count)
            self.names += [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]
            self.slices[name] = self.slices_of(shard)

    def size(self, name: str) -> int:
        """Return the number of elements of one of a weight's matrices."""
        return math.prod(self._shapes[name]) // len(self.rows[name])

    def slices_of(self, span: Span | Shard) -> list[MatrixSlice]:
        """Return the slices of those matrices that consecutive elements of a weight reach into."""
        rows = self.rows[span.name]
        size = self.size(span.name)
        slices = []
        for row in rows[span.start // size : -(-span.stop // size)] if span.start < span.stop else ():
            # Elements of the matrix, counted in the flattened weight.
            first = (row - rows.start) * size
            start = max(span.start, first)
            stop = min(span.stop, first + size)
            slices.append(MatrixSlice(row, start - span.start, stop - span.start, start - first))
        return slices

    def table(self, columns: int) -> Tensor:
        """Return (matrices, columns) fp64 zeros on the device of collectives."""
        return torch.zeros(len(self.names), columns, dtype=torch.float64, device=self.layout.device)
