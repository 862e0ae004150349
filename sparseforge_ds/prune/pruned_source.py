"""Source of an export for a model that was pruned block by block: its results, and dense files for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.export.source import Source, require_finite
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.prune.block_files import read_result
from sparseforge_ds.prune.dense_model import DenseModel


class PrunedSource(Source):
    """Final weights of a model that was pruned block by block."""

    def __init__(
        self,
        dense: DenseModel,
        results: Mapping[str, Path],
        weights: Sequence[PrunableWeight],
        pattern: Pattern,
        dtype: torch.dtype,
        record: dict[str, Any],
    ) -> None:
        """Find the final value of every tensor.

        Args:
            dense: the model that was pruned.
            results: file of safetensors with the final value of a tensor, by its name in the dense files.
            weights: those in the pattern, by names in memory.
            pattern: of the weights.
            dtype: of the model.
            record: entries of `sparsity.json` about the origin of the model.
        """
        self._dense = dense
        self._results = results
        self.folder = self.model_folder = dense.folder
        self.model_config = dense.stored_config
        self.pattern = pattern
        self.dtype = dtype
        self.unused = dense.unused
        self.branches = {}
        # Weights have other names in memory than in the files.
        self.specs = dict(dense.specs)
        axes = {weight.name: weight.input_axis for weight in weights}
        self.prunable = {
            name: SparseWeight(name, part.shape, axes[part.memory_name])
            for name, part in dense.parts.items()
            if part.memory_name in axes
        }
        self.fused_name = {name: part.memory_name for name, part in dense.parts.items() if part.memory_name != name}
        self.record = {"format": 1, "dtype": str(dtype).removeprefix("torch."), "pattern": str(pattern), **record}

    @override
    def read(self, name: str) -> Tensor:
        value = read_result(self._results[name], name) if name in self._results else self._dense.tensors.read(name)
        if name in self.prunable:
            value += 0.0  # rounding gives -0.0
        require_finite(value, name, self.folder)
        return value
