"""Source of an export that reads a Hugging Face folder: one of ours, dense or packed, or a 2:4 one of somebody else.

A folder without `sparsity.json` (Wanda, SparseGPT, Sparse-Llama) does not say which weights are sparse. So all of it is
checked as `sparseforge verify --pattern 2:4` does: every weight that the family table names, or, in a family without
rows, every matrix of a numbered layer.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec, hash_file, hash_tensor
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.export.adapter import (
    ADAPTER_STEM,
    ADAPTER_TENSORS,
    branch_of_key,
    key_of,
    reject_foreign_adapter,
    require_adapter,
)
from sparseforge_ds.export.source import (
    DTYPES,
    HEAD,
    Source,
    buffer_names,
    check_config,
    choose_dtype,
    config_as_loaded,
    origin_sections,
    read_config_json,
    recorded_config,
    require_dtype,
    require_finite,
    require_same_model,
    without_quantization,
)
from sparseforge_ds.export.stored import StoredWeights, listed_weights, reads_as
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.mask.pattern import NM, parse_pattern, require_removing
from sparseforge_ds.model.branch import branch_rank
from sparseforge_ds.model.families import BRANCH, LOW_RANK
from sparseforge_ds.model.stored_config import configured_dtype, is_packed_config

_KEYS = ("format", "dtype", *HEAD)


class FolderSource(Source):
    """Final weights of a model in a folder; each is checked against its listed sha256 as it is read."""

    def __init__(
        self,
        path: str | Path,
        model: str | Path | None = None,
        dtype: str = "auto",
        exclude: Sequence[str] = (),
        pattern: str | None = None,
        workers: int | None = None,
    ) -> None:
        """Open a folder; the arguments are those of `open_source`.

        Raises:
            ValueError: the folder is damaged, or is not what its `sparsity.json` says.
        """
        self.folder = Path(path)
        self.model_folder = self.folder if model is None else Path(model)
        self._exported = (self.folder / "sparsity.json").is_file()
        if self._exported and exclude:
            raise ValueError(
                f"--exclude {exclude[0]}: {path} has a sparsity.json, which says what is dense; leave it out"
            )
        if self._exported and pattern is not None:
            raise ValueError(f"--pattern {pattern}: {path} has a sparsity.json, which says the pattern; leave it out")
        stored_config = config_as_loaded(self.folder, read_json_object(self.folder / "config.json"))
        self._weights = StoredWeights(self.folder, stored_config)
        self.unused = self._weights.unused
        self.grid = self._weights.grid
        # transformers writes packed folders too, by save_pretrained.
        if self.model_folder == self.folder and is_packed_config(stored_config):
            self.model_config = without_quantization(stored_config)
        else:
            self.model_config = read_config_json(self.model_folder)
        if model is not None:
            require_same_model(self.model_folder, self.folder)
        # The record of the folder, or one that is made from its weights.
        written = read_json_object(self.folder / "sparsity.json") if self._exported else {}
        reject_foreign_adapter(self.folder, written)
        self._sparsity = written if self._exported else self._infer_record(exclude, pattern, workers)
        if missing := [key for key in (*_KEYS, "weights", "dense") if key not in self._sparsity]:
            raise ValueError(f"{self.folder / 'sparsity.json'}: has no {missing[0]}; it was not written by consolidate")
        self.record = {key: self._sparsity[key] for key in _KEYS}
        sections = origin_sections(self.folder / "sparsity.json", self.record)
        recorded_config(self.folder, sections["config"])
        self.pattern = parse_pattern(str(self.record["pattern"]))
        if model is None:
            check_config(self.model_folder, self.model_config, self._sparsity.get("config_sha256"))
        # The dtype of all parameters.
        self.dtype, casts_from = self._find_dtype(dtype)
        self.record["dtype"] = str(self.dtype).removeprefix("torch.")
        # Every tensor of the files is listed, with its shape and dtype, and every listed one is there.
        weights, dense, branches = listed_weights(self.folder, self._sparsity)
        self._listed = weights | dense | branches
        if set(self._listed) != set(self._weights.specs):
            unmatched = sorted(set(self._listed) ^ set(self._weights.specs))[0]
            raise ValueError(
                f"{self.folder}: {unmatched} is not in both sparsity.json and the safetensors; export again"
            )
        uncast = set[str]() if casts_from is None else buffer_names(self.model_folder, casts_from)
        self.specs = {}
        for name, spec in self._weights.specs.items():
            if "shape" not in self._listed[name] or not reads_as(spec, self._listed[name]):
                raise ValueError(
                    f"{self.folder}: {name} has not the shape and dtype that sparsity.json gives it; export again"
                )
            casts = casts_from is not None and spec.dtype.is_floating_point and name not in uncast
            if name not in branches:
                self.specs[name] = TensorSpec(spec.shape, self.dtype if casts else spec.dtype)
        where = str(self.folder / "sparsity.json")
        self.prunable = {n: SparseWeight.parse({"name": n, **row}, self.pattern, where) for n, row in weights.items()}
        self.fused_name = {name: str(row["fused_name"]) for name, row in self._listed.items() if "fused_name" in row}
        # Branches lie among the weights (packed) or in an adapter.
        self._adapter: TensorFolder | None = None
        shapes = {name: self._weights.specs[name].shape for name in branches}
        if self._sparsity.get("adapter"):
            require_adapter(self.folder)
            self._adapter = TensorFolder(self.folder, ADAPTER_STEM)
            learned = BRANCH if self.low_rank.learned else (LOW_RANK,)
            for key, spec in self._adapter.specs.items():
                branch_name = branch_of_key(key)
                if branch_name is not None and branch_name.endswith(learned):
                    shapes[branch_name] = spec.shape
        self._set_branches(shapes)
        # Transformers builds the branches of a packed folder by its config.json.
        if is_packed_config(stored_config):
            settings = stored_config["quantization_config"]
            told = {key: value for key, value in settings.items() if key in ("low_rank", "low_rank_learned") and value}
            if told != self.branch_settings:
                raise ValueError(
                    f"{self.folder / 'config.json'}: low_rank of its quantization_config is not that of the branches "
                    "in the folder; export again"
                )

    def _find_dtype(self, dtype: str) -> tuple[torch.dtype, str | None]:
        """Return the dtype of all parameters, and the setting that casts them to it, or None without a cast.

        Raises:
            ValueError: an export has no such dtype.
        """
        if dtype != "auto":
            return choose_dtype(dtype, self.model_folder, self.model_config), "--dtype"
        stored_dtype = self.record["dtype"]
        if self._exported:
            if not isinstance(stored_dtype, str) or stored_dtype not in DTYPES:
                raise ValueError(f"{self.folder / 'sparsity.json'}: dtype {stored_dtype!r}; export again")
            return DTYPES[stored_dtype], None
        # transformers computes in the dtype of config.json, whatever the files hold.
        configured = configured_dtype(self.model_config)
        if configured is not None:
            origin = f"{self.model_folder / 'config.json'}: dtype {configured!r}"
            return require_dtype(configured, origin), None if configured == stored_dtype else origin
        first = next(iter(self._sparsity["weights"]))
        return require_dtype(stored_dtype, f"{self.folder}: {first}: its dtype {stored_dtype!r}"), None

    def _infer_record(self, exclude: Sequence[str], pattern_name: str | None, workers: int | None) -> dict[str, Any]:
        """Read all weights, and return the content that `sparsity.json` would have in a folder without one.

        Raises:
            ValueError: the weights are not in the pattern, 2:4 if none is given.
        """
        pattern = NM(2, 4) if pattern_name is None else require_removing(parse_pattern(pattern_name))
        report = check_folder(self.folder, pattern, workers, exclude)
        command = f"sparseforge verify {shlex.quote(str(self.folder))}"
        if report.violations or report.missing or not report.rows:
            worst = max(report.rows, key=lambda row: row.violations, default=None)
            example = (
                f"{worst.violations:,} of {worst.groups:,} groups of {worst.name}" if worst else "no weight of a layer"
            )
            raise ValueError(
                f"{self.folder}: has no sparsity.json, and is not {pattern} as it is: {(*report.missing, example)[0]}; "
                f"run `{command} --pattern {shlex.quote(str(pattern))}` to see every weight. `sparseforge export` "
                "takes --exclude for weights that are dense, and --pattern; `sparseforge prune` prunes a dense model"
            )
        if report.notes:
            raise ValueError(f"{self.folder}: {report.notes[0]}; run `{command}` to see all")
        # Everything else about the folder is unknown.
        rows = {name: {"shape": list(spec.shape)} for name, spec in self._weights.specs.items()}
        weights = {row.name: {**rows.pop(row.name), "input_axis": row.input_axis} for row in report.rows}
        return {
            "format": 1,
            "dtype": str(self._weights.specs[report.rows[0].name].dtype).removeprefix("torch."),
            "pattern": str(pattern),
            "finished": True,
            "step": None,
            "source": {"folder": self.folder.absolute().name},
            "coverage": {},
            "run": {},
            "config": {"pattern": str(pattern), **({"exclude": list(exclude)} if exclude else {})},
            "weights": weights,
            "dense": rows,
        }

    @override
    def read(self, name: str) -> Tensor:
        value = self._checked(name).to(self.specs[name].dtype)
        if name in self.prunable:
            value += 0.0  # rounding gives -0.0, and folders of others may hold them
        require_finite(value, name, self.folder)
        return value

    @override
    def read_branch(self, name: str) -> Tensor:
        adapter = self._adapter
        value = (self._checked(name) if adapter is None else adapter.read(key_of(name))).to(self.dtype)
        require_finite(value, name, self.folder)
        return value

    def _checked(self, name: str) -> Tensor:
        """Read a tensor of the folder, and compare it with its hash."""
        value = self._weights.read(name)
        if self._exported and hash_tensor(value) != self._listed[name].get("sha256"):
            raise ValueError(
                f"{self.folder}: {name} has not the bytes that sparsity.json gives the sha256 of; the folder was "
                "changed or damaged, export again"
            )
        return value

    @override
    def check_bytes(self, workers: int | None = None) -> None:
        """Compare the adapter with its hash; weights are compared whenever they are read."""
        expected = self._sparsity.get("adapter_sha256")
        if expected is not None and hash_file(self.folder / ADAPTER_TENSORS) != expected:
            raise ValueError(
                f"{self.folder / ADAPTER_TENSORS}: has not the sha256 that sparsity.json gives; export again"
            )

    def _set_branches(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Fill `branches` from the shapes of their tensors in the folder.

        Raises:
            ValueError: a shape does not follow from the config and the weight of its layer.
        """
        self.branches = {}
        if not shapes:
            return
        # The shapes that the config gives to the branch of each sparse weight.
        low_rank = self.low_rank
        for name in shapes:
            module = name.rpartition(".")[0]
            if (weight := self.prunable.get(f"{module}.weight")) is not None:
                inputs = weight.shape[weight.input_axis]
                outputs = math.prod(weight.shape) // inputs
                rank = branch_rank(outputs, inputs, low_rank.k, low_rank.learned)
                self.branches[module] = outputs, rank
        # They are compared with those in the folder.
        expected = {name: tuple(spec.shape) for name, spec in self.branch_specs.items()}
        for name in sorted(expected.keys() | shapes):
            if name not in expected:
                raise ValueError(f"{self.folder}: {name} is the branch of no weight of sparsity.json; export again")
            if (shape := shapes.get(name)) != expected[name]:
                actual = "missing" if shape is None else f"of shape {tuple(shape)}"
                raise ValueError(f"{self.folder}: {name} is {actual}, and not {expected[name]}; export again")
