"""Row and column sums of all matrices in one vector, for one reduction."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from sparseforge_ds.mask.factored import add_sums, segment_sums, shares
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.zero.matrices import Matrices
from sparseforge_ds.zero.shard import Shard


class AxisSums:
    """R row sums and C column sums, fp64, of every (R, C) matrix in `Matrices`."""

    def __init__(self, matrices: Matrices, shards: dict[str, Shard], device: torch.device) -> None:
        """Make zeros on `device`."""
        self.matrices = matrices
        self.shards = shards
        self.bounds: list[tuple[int, int, int]] = []
        """Start of each matrix's row sums, start of its column sums, and end."""
        extents = []
        end = 0
        for name, rows in matrices.rows.items():
            columns = shards[name].shape[-1]
            height = self.matrices.size(name) // columns
            for _ in rows:
                self.bounds.append((end, end + height, end + height + columns))
                extents.append((height, columns))
                end += height + columns
        self.values = torch.zeros(end, dtype=torch.float64, device=device)
        self.extents = torch.tensor(extents, device=device).view(-1, 2)
        """(matrices, 2) int64 R and C of each."""

    def holding(self, values: Tensor) -> AxisSums:
        """Return sums of the same matrices that hold `values`."""
        other = copy.copy(self)
        other.values = values
        other.extents = self.extents.to(values.device)
        return other

    def zeros(self) -> AxisSums:
        """Return zeros for the same matrices."""
        return self.holding(torch.zeros(self.bounds[-1][2], dtype=torch.float64, device=self.extents.device))

    def totals(self) -> Tensor:
        """Return (matrices,) sums over the elements of every matrix."""
        return segment_sums(self.values, self.extents)[:, 0]

    def factors(self, device: torch.device) -> AxisSums:
        """Return the fp32 factors of the curvature of every matrix, see `shares`, in the place of its sums."""
        other = copy.copy(self)
        # Only the factors move: `matrix_sums` finds them by numbers of the host.
        other.values = shares(self.values, self.extents).to(device)
        return other

    def matrix_sums(self, matrix: int) -> tuple[Tensor, Tensor]:
        """Return views of the (R,) row and (C,) column sums of a matrix, by its row in the table of `Matrices`."""
        start, middle, end = self.bounds[matrix]
        return self.values[start:middle], self.values[middle:end]

    def weight_sums(self, name: str) -> Tensor:
        """Return a view of the sums of all matrices of a weight, end to end, row sums before column sums."""
        rows = self.matrices.rows[name]
        return self.values[self.bounds[rows.start][0] : self.bounds[rows.stop - 1][2]]

    def add_shards(self, values: Callable[[Shard], Tensor]) -> None:
        """Add the sums of `values`, (numel of the shard,), over the shards of all ranks. Collective, one reduction."""
        for name, shard in self.shards.items():
            for part in self.matrices.slices[name]:
                inside = values(shard)[part.inside]
                for chunk in chunks(inside):
                    add_sums(inside[chunk], part.first + chunk.start, *self.matrix_sums(part.row))
        layout = self.matrices.layout
        self.values = layout.sum_shards(self.values.to(layout.device)).to(self.values.device)
