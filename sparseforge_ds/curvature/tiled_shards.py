"""Shards whose masks are updated a partition at a time (`mask.kernels.tiles`), and tables of where they lie."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import Tensor

from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.kernels.codes import CODE
from sparseforge_ds.mask.kernels.tiles import (
    SUMS,
    MatrixRun,
    TiledCurvature,
    TiledPartition,
    add_moments,
    can_tile,
    cut_into_tiles,
    new_moments,
    sum_moments,
    update_partition,
)
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.shard import Shard

_LOG = logging.getLogger(__name__)


def tiled_shards(weights: ShardedWeights) -> TiledShards | None:
    """Cut this rank's shards into tiles, or return None where masks are updated matrix by matrix. Collective.

    Tiles take soft masks of 2:4 on a GPU, scored by magnitude or by a curvature that is a product, and weights that
    are not quantized.
    """
    config = weights.config
    is_product = not config.keeps_elements or config.factored
    is_plain = weights.state.mask_dtype == CODE and config.quantize is None
    if is_product and is_plain and can_tile(weights.pattern, weights.layout.flats[0].device):
        return TiledShards(weights)
    return None


class TiledShards:
    """Tables of the tiles of this rank's shards."""

    def __init__(self, weights: ShardedWeights) -> None:
        """Cut the shards into tiles, and copy the tables to their device. Collective."""
        self.weights = weights
        self.rest: list[str] = []
        """Weights whose shard is updated by itself: it cuts a group or a byte of bits, or its inputs come first."""
        sums = AxisSums(weights.matrices, weights.shards, torch.device("cpu"))
        runs: dict[int, list[MatrixRun]] = {index: [] for index in weights.state.shards_in}
        self.chunks: dict[int, list[Shard]] = {index: [] for index in runs}
        """Chunks of the shards that are in tiles, by partition."""
        inputs_first = 0
        misaligned = 0
        for name, shard in weights.shards.items():
            if not shard.numel:
                continue
            weight = weights.prunable[name]
            runs_of_shard = [
                MatrixRun(
                    matrix_slice.row,
                    matrix_slice.first,
                    shard.offset + matrix_slice.start,
                    matrix_slice.stop - matrix_slice.start,
                )
                for matrix_slice in weights.matrices.slices[name]
            ]
            if weight.input_axis % len(weight.shape) != len(weight.shape) - 1:
                inputs_first += shard.numel
                self.rest.append(name)
            elif not all(run.is_aligned for run in runs_of_shard):
                misaligned += shard.numel
                self.rest.append(name)
            else:
                runs[shard.flat] += runs_of_shard
                self.chunks[shard.flat] += weights.chunks([name])
        self._report_rest(inputs_first, misaligned)
        self.complete = set(runs) - {weights.shards[name].flat for name in self.rest}
        """Partitions all of whose shards are in tiles."""
        # One table for all partitions, of which each has a part; a matrix lies in one shard, and its tiles end to end.
        bounds = [(start, middle, end - middle) for start, middle, end in sums.bounds]
        segments = [(0, 0) for _ in bounds]
        self._parts: dict[int, slice] = {}
        stop = 0
        for index, runs_of_flat in runs.items():
            first = stop
            for run in runs_of_flat:
                segments[run.matrix] = (stop, stop + run.tiles)
                stop += run.tiles
            self._parts[index] = slice(first, stop)
        # Host tensors go over once, here.
        device = weights.layout.flats[0].device
        self._table = cut_into_tiles([run for runs_of_flat in runs.values() for run in runs_of_flat]).to(device)
        self._segments = torch.tensor(segments).view(-1, 2).to(device)
        self._bounds = torch.tensor(bounds).view(-1, 3).to(device)
        self._all_measured = torch.ones(len(bounds), dtype=torch.bool, device=device)
        self._none_measured = torch.zeros(len(bounds), dtype=torch.bool, device=device)
        self._no_factors = torch.zeros(1, device=device)

    def moments(self, factors: AxisSums | None) -> Tensor:
        """Return (matrices, 7) fp64 `importance.score_moments` of what is in tiles on this rank.

        Args:
            factors: factors of the curvature; None for plain magnitude.
        """
        # A row of sums for every tile of every partition.
        curvature = self._curvature(factors, ())
        sums = new_moments(self._table)
        for index, tiles in self._parts.items():
            dense = self.weights.state.weights_being_trained(index).view(-1)
            sum_moments(dense, curvature, self._table[tiles], sums[tiles])
        # One row for every matrix.
        return add_moments(sums, self._segments)

    def move(
        self, factors: AxisSums | None, by_magnitude: Collection[int], scaling: Tensor, dials: Dials, midpoint: bool
    ) -> None:
        """Update the masks of all tiles, account for them in the metrics, and write m_eff W to the masters.

        Args:
            factors: see `moments`.
            by_magnitude: rows of matrices that are scored by magnitude.
            scaling: (matrices, 3) fp64, see `importance.scalings`.
            dials: the annealed numbers at this step.
            midpoint: see `mask.update.threshold`.
        """
        weights = self.weights
        state = weights.state
        # Without targets of an earlier update there are no flips to count.
        are_known = all(weights.metrics.has_target_bits(index) for index in self._parts)
        # One launch a partition, each with the rows of its own tiles.
        curvature = self._curvature(factors, by_magnitude)
        sums = torch.empty(len(self._table), SUMS, device=self._table.device)
        for index, tiles in self._parts.items():
            kept = state.packed_kept(index)
            partition = TiledPartition(
                state.weights_being_trained(index).view(-1),
                state.partition(index)["mask"].view(-1),
                weights.metrics.target_bits(index, kept, self.chunks[index]),
                kept,
                weights.layout.flats[index].data.view(-1),
            )
            update_partition(partition, curvature, scaling, self._table[tiles], dials, midpoint, sums[tiles])
        # The sums of all tiles, for the metrics.
        elements = sum(chunk.numel for chunks in self.chunks.values() for chunk in chunks)
        weights.metrics.add_tiles(sums.sum(dim=0, dtype=torch.float64), elements, are_known)

    def _report_rest(self, inputs_first: int, misaligned: int) -> None:
        """Log how many elements of all ranks are not in tiles, and why. Collective."""
        elements = sum(shard.numel for shard in self.weights.shards.values())
        of_ranks = self.weights.layout.all_gather_object((elements, inputs_first, misaligned))
        elements, inputs_first, misaligned = (sum(counts) for counts in zip(*of_ranks, strict=True))
        if inputs_first + misaligned and self.weights.layout.rank == 0:
            _LOG.info(
                "masks of %.1f%% of the pruned weights are updated matrix by matrix, which takes longer: %.1f%% have "
                "their inputs in rows (Conv1D), and the shards of %.1f%% begin or end inside a byte of mask bits",
                100 * (inputs_first + misaligned) / elements,
                100 * inputs_first / elements,
                100 * misaligned / elements,
            )

    def _curvature(self, factors: AxisSums | None, by_magnitude: Collection[int]) -> TiledCurvature:
        """Return H of all matrices as tiles take it."""
        if factors is None:
            return TiledCurvature(self._no_factors, self._bounds, self._none_measured)
        is_measured = self._all_measured
        if by_magnitude:
            rows = torch.tensor(sorted(by_magnitude), device=is_measured.device)
            is_measured = is_measured.index_fill(0, rows, False)
        return TiledCurvature(factors.values, self._bounds, is_measured)
