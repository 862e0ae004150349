"""Interfaces of curvature estimators, and the layers, shards and experts of this rank that they work on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.curvature.expert_load import ExpertLoad
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.expert_hooks import expert_tokens, why_unhookable
from sparseforge_ds.zero.extra_passes import ExtraPasses, ProbeBatches
from sparseforge_ds.zero.layer_hooks import token_gradients
from sparseforge_ds.zero.shard import Shard

Diagonal = dict[str, Tensor]
"""(numel of the shard,) fp32 by weight name."""


class Estimator(Protocol):
    """One way to estimate the diagonal, by elements."""

    def refresh(
        self, batches: ProbeBatches, step: int, probes: int, total: Diagonal, write_masters: Callable[[], None]
    ) -> bool:
        """Average `probes` probes. Collective.

        Args:
            batches: what the probes read.
            step: optimizer steps so far, for random numbers.
            probes: how many, each on a batch of its own.
            total: zeros by weight name, which the average is written to.
            write_masters: restores the masters to m_eff W.

        Returns:
            False if a probe was infinite or NaN and nothing can be said.
        """


class SumsEstimator(Protocol):
    """One way to estimate the row and column sums of the diagonal, of which no elements are formed."""

    def refresh(self, batches: ProbeBatches, step: int, probes: int) -> bool:
        """Collect the sums of `probes` probes, else as `Estimator.refresh`."""

    def finish(self) -> tuple[AxisSums, Tensor]:
        """Return this rank's sums, and (matrices,) divisors of the sums over all ranks. Collective.

        An expert that saw no token has 0.
        """


class EstimatorContext:
    """Layers, shards and experts of this rank, for every estimator."""

    def __init__(self, weights: ShardedWeights, extra_passes: ExtraPasses, expert_load: ExpertLoad) -> None:
        """Find the layers of all prunable weights.

        Raises:
            ValueError: the experts of some module cannot be hooked.
        """
        prunable = weights.prunable
        layers = {name: weights.engine.module.get_submodule(weight.module) for name, weight in prunable.items()}
        self.input_first = {name for name, weight in prunable.items() if weight.input_axis == -2}
        """Weights that are stored as (..., in, out)."""
        self.extra_passes = extra_passes
        self.layout = weights.layout
        self.matrices = weights.matrices
        self.ranges = weights.halo.ranges
        self.chunks = weights.halo.chunks
        self.shards = weights.shards
        sums = AxisSums(self.matrices, self.shards, self.layout.device)
        self.empty_sums = sums.holding(sums.values.new_empty(0))
        """Row and column sums of all matrices without numbers; a measurement begins with `zeros` of it."""
        self.expert_load = expert_load
        self.modules = {name: layer for name, layer in layers.items() if isinstance(layer, (nn.Linear, Conv1D))}
        """Linear layer of each weight that has one, by weight name."""
        self.fused = {prunable[n].module: layers[n] for n in expert_load.rows if len(prunable[n].shape) == 3}
        """Modules that hold experts as three-dimensional weights, by module name."""
        for name, module in self.fused.items():
            if (why := why_unhookable(module)) is not None:
                raise ValueError(
                    f"{name}: {type(module).__name__} {why}, so the tokens of its experts cannot be counted; "
                    f'use "importance": "magnitude", or keep it dense with "exclude": ["{name}.*"]'
                )
        # One layer of each expert in a list counts the tokens for all layers of this expert.
        counted_by: dict[int, str] = {}
        for name in expert_load.rows:
            if name in self.modules:
                counted_by.setdefault(expert_load.rows[name].start, name)
        self.listed = {name: self.modules[name] for name in counted_by.values()}
        in_lists = [name for name in expert_load.rows if name in self.modules]
        self.lists = {
            layer: names
            for layer, rows in expert_load.layers.items()
            if (names := [name for name in in_lists if expert_load.rows[name].start in rows])
        }
        """Weights of the experts in each list of modules, by the list's name."""

    def sums_of(self, name: str, sums: AxisSums) -> tuple[Tensor, Tensor]:
        """Return views of the sums by output and by input of a weight that is one matrix."""
        (matrix,) = self.matrices.rows[name]
        row_R, column_C = sums.matrix_sums(matrix)
        return (column_C, row_R) if name in self.input_first else (row_R, column_C)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of every expert in backward passes while active; call `ExpertLoad.agree` afterwards."""

        def fused(layer: str, parameter: str, _g: Tensor | None, _x: Tensor, stop_E: Tensor, _tokens: int) -> None:
            self.count(layer, parameter, stop_E)

        def listed(name: str, grad_TO: Tensor, _input: Tensor) -> None:
            self.expert_load.add(self.expert_load.rows[name], grad_TO.shape[0])

        with expert_tokens(self.fused, fused), token_gradients(self.listed, listed):
            yield

    def count(self, layer: str, parameter: str, stop_E: Tensor) -> None:
        """Count the tokens of a layer's fused experts, once for both of their weights."""
        if parameter == "down_proj":
            self.expert_load.add(self.expert_load.layers[layer], stop_E.diff(prepend=stop_E.new_zeros(1)))

    def agree_on_counts(self, tokens: Mapping[str, float]) -> Tensor:
        """Return (matrices,) fp64 tokens of all ranks, of an expert those that it saw. Collective.

        Args:
            tokens: of this rank at the layer of each weight, by its name; those of experts are in `expert_load`.
        """
        of_matrices = [tokens[name] for name, rows in self.matrices.rows.items() for _ in rows]
        counts = torch.tensor(of_matrices, dtype=torch.float64, device=self.layout.device)
        self.layout.all_reduce(counts)
        self.expert_load.agree()
        return self.expert_load.spread(self.expert_load.counted, counts)

    def divide(self, diagonal: Diagonal, by: list[float]) -> None:
        """Divide what belongs to an expert by the number in its row; what belongs to none stays."""
        for name in self.expert_load.rows.keys() & diagonal.keys():
            for matrix_slice in self.matrices.slices[name]:
                row = self.expert_load.of_matrix[matrix_slice.row]
                assert row is not None
                if by[row]:
                    diagonal[name][matrix_slice.inside] /= by[row]

    def zeros(self) -> Diagonal:
        """Return a diagonal of zeros, on the devices of the master partitions."""
        return {
            name: torch.zeros(shard.numel, dtype=torch.float32, device=self.layout.flats[shard.flat].device)
            for name, shard in self.shards.items()
        }

    def tokens_of(self, number: int, rows: int) -> list[range]:
        """Return the numbers of this rank's tokens in a pass, counted through all passes and ranks.

        Random signs depend on these numbers, so they do not depend on how a step is divided.

        Args:
            number: of the pass.
            rows: how many tokens this rank has in it, sequence by sequence.
        """
        layout = self.layout
        parts = layout.sequence_parallel
        readers = layout.world_size // parts
        reader, position = divmod(layout.rank, parts)
        first = (number * readers + reader) * rows * parts
        if parts == 1:
            return [range(first, first + rows)]
        sequences = int(layout.engine.train_micro_batch_size_per_gpu())
        if rows % sequences:
            raise ValueError(
                f"a pass of {rows} tokens a rank is not of train_micro_batch_size_per_gpu = {sequences} sequences, so "
                "that ranks which share them cannot draw the same numbers; give every pass that many"
            )
        length = rows // sequences
        starts = (first + (sequence * parts + position) * length for sequence in range(sequences))
        return [range(start, start + length) for start in starts]

    def add_gradient(self, index: int, gradient: Tensor, names: set[str], add: Callable[[Shard, Tensor], None]) -> None:
        """Call add(shard, its gradient) for the shards of `names` in one master partition."""
        for shard in self.layout.shards_in[index]:
            if shard.name in names:
                add(shard, shard.slice_of_flat(gradient).float())
