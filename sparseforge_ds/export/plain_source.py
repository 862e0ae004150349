"""A 2:4 Hugging Face folder that somebody else made (Wanda, SparseGPT, Sparse-Llama), as the source of an export.

Nothing says what it must be, so it is checked as `sparseforge verify --pattern 2:4` does before anything is written:
every weight that the family table names, or, of another family, every matrix of a numbered layer, is 2:4.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from typing_extensions import override

from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.export.adapter import CONFIG
from sparseforge_ds.export.source import Source, choose_dtype, read_model_config, require_finite
from sparseforge_ds.export.verify import check_folder
from sparseforge_ds.export.workers import default_workers
from sparseforge_ds.mask.pattern import NM


class PlainSource(Source):
    """Final weights as they lie in a folder without sparsity.json; -0.0 becomes +0.0 in those that are 2:4.
    Arguments of `open_source`. Raises ValueError where the folder holds quantized weights, or is not 2:4."""

    def __init__(self, path: str | Path, model: str | Path | None = None, dtype: str = "auto") -> None:
        self.folder = Path(path)
        self.model_folder = self.folder if model is None else Path(model)
        self.model_config = read_model_config(self.model_folder)
        if (self.folder / CONFIG).is_file():
            raise ValueError(
                f"{self.folder}: has a PEFT adapter beside its weights, which sparseforge export did not write and "
                "would be left behind; merge it into the weights, prune those again, or take the adapter out"
            )
        self._tensors = TensorFolder(self.folder)
        self.pattern = NM(2, 4)
        report = check_folder(self.folder, self.pattern, workers=default_workers())
        if report.violations or report.missing or not report.rows:
            worst = max(report.rows, key=lambda row: row.violations, default=None)
            why = (
                f"{worst.violations:,} of {worst.groups:,} groups of {worst.name}" if worst else "no weight of a layer"
            )
            why = report.missing[0] if report.missing else why
            raise ValueError(
                f"{self.folder}: has no sparsity.json, and is not {self.pattern} as it is: {why}; run "
                f"`sparseforge verify {self.folder}` to see every weight"
            )
        chosen = None if dtype == "auto" else choose_dtype(dtype, self.model_folder, self.model_config)
        self.specs = {
            name: TensorSpec(spec.shape, chosen if chosen and spec.dtype.is_floating_point else spec.dtype)
            for name, spec in self._tensors.specs.items()
        }
        self.prunable = {row.name: SparseWeight(row.name, row.shape, row.input_axis) for row in report.rows}
        self.branches = {}
        self.dtype = self.specs[next(iter(self.prunable))].dtype
        self.record = {
            "format": 1,
            "dtype": str(self.dtype).removeprefix("torch."),
            "pattern": str(self.pattern),
            "finished": True,
            "step": None,
            "source": {"folder": self.folder.absolute().name},
            "coverage": {},
            "run": {},
            "permutation": None,
            "config": SparseForgeConfig(pattern=str(self.pattern)).to_dict(),
        }

    @override
    def read(self, name: str) -> Tensor:
        value = self._tensors.read(name).to(self.specs[name].dtype)
        if name in self.prunable:
            value += 0.0
        require_finite(value, name, self.folder)
        return value
