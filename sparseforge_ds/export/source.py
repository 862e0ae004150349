"""What an export starts from: the tensors of the final model, one at a time, and all that belongs to them.

`open_source` says which kind it is. Each checks what it gives out: a run's mask and masters against each other, the
bytes of a folder against the hashes beside them.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.checkpoint.model_files import check_links
from sparseforge_ds.checkpoint.tensors import TensorSpec
from sparseforge_ds.config import LowRankConfig, SparseForgeConfig
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.export.counting import count_not_finite
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import LOW_RANK, PROJECTION
from sparseforge_ds.model.loading_error import reason
from sparseforge_ds.model.registration import build_model, load_config
from sparseforge_ds.model.stored_config import config_sha256

HEAD = ("pattern", "finished", "step", "source", "coverage", "config", "run")
"""Keys of `sparsity.json` that say where a model comes from."""


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""What a model can be exported in, by the name that config.json uses."""


class Source(abc.ABC):
    """Where final weights come from."""

    specs: dict[str, TensorSpec]
    """Every tensor of the final model, in order, as it is stored, under its published name."""
    fused_name: Mapping[str, str] = MappingProxyType({})
    """Name in the run, of those that had another one there: the fused weight that an expert's is a part of."""
    prunable: dict[str, SparseWeight]
    """Those of them that are in the pattern."""
    pattern: Pattern
    record: dict[str, Any]
    """The head of `sparsity.json`: format, dtype and `HEAD`. Plain JSON."""
    dtype: torch.dtype
    """Of all parameters; buffers keep their own."""
    model_folder: Path
    """Where the tokenizer and the other files of the model are."""
    model_config: dict[str, Any]
    """config.json, as the model was given it."""
    branches: dict[str, tuple[int, int]]
    """SLoRB: name of the module -> shape of its B, (out, rank). Empty without."""
    unused: Sequence[str] = ()
    """Tensors of its files that are no part of the model, and are left out."""
    folder: Path
    """What was opened: a checkpoint or a folder, for messages."""

    @property
    def low_rank(self) -> LowRankConfig:
        """Of the branches. Raises ValueError where nothing says of what kind they are."""
        low_rank = None if (config := self._config) is None else config.low_rank
        if low_rank is None:
            raise ValueError(
                f"{self.folder}: has low-rank branches, and its config does not say of what k; export again"
            )
        return low_rank

    @property
    def branch_specs(self) -> dict[str, TensorSpec]:
        """The learned tensors of the branches, by name: B, (out, rank), and where it is learned P, (rank, in)."""
        specs, learned = {}, bool(self.branches) and self.low_rank.learned
        for module, (outputs, rank) in self.branches.items():
            specs[f"{module}.{LOW_RANK}"] = TensorSpec((outputs, rank), self.dtype)
            if learned:
                weight = self.prunable[f"{module}.weight"]
                specs[f"{module}.{PROJECTION}"] = TensorSpec((rank, weight.shape[weight.input_axis]), self.dtype)
        return specs

    @property
    def _config(self) -> SparseForgeConfig | None:
        config = self.record.get("config")
        return SparseForgeConfig.from_dict(config) if isinstance(config, dict) else None

    @abc.abstractmethod
    def read(self, name: str) -> Tensor:
        """The final value of a tensor of `specs`: finite, dead members exactly +0.0, in memory of its own. Several
        threads may read at once. Raises ValueError where it is damaged, inconsistent, or not finite in its dtype."""

    def read_branch(self, name: str) -> Tensor:
        """A tensor of `branch_specs`, in `dtype`."""
        raise KeyError(name)

    def check_bytes(self, workers: int | None = None) -> None:  # noqa: B027
        """Compare the checksums of the files that `read` does not check by itself."""


def configured_dtype(model_config: dict[str, Any]) -> str | None:
    """The dtype that config.json has; of a model that also sees it may stand with its text model's settings alone."""
    parts = (model_config, model_config.get("text_config") or {})
    said = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next((str(dtype) for dtype in said if dtype is not None), None)


def choose_dtype(dtype: str, model_folder: Path, model_config: dict[str, Any]) -> torch.dtype:
    """One of `DTYPES`, or what config.json says for auto."""
    if dtype == "auto":
        where = f"{model_folder / 'config.json'}: dtype"
        dtype = configured_dtype(model_config) or "float32"
    else:
        where = "--dtype"
    if dtype not in DTYPES:
        raise ValueError(f"{where} {dtype!r}: use one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def buffer_names(folder: Path) -> set[str]:
    """Buffers of the model that a folder's config.json describes, such as the biases of a router: a chosen dtype is
    that of the parameters, and rounds no buffer. Raises ValueError where transformers has no class for it."""
    config = load_config(folder, f"--dtype: {folder}", cached=True)
    try:
        with torch.device("meta"):
            model = build_model(config)
    except ValueError as error:
        raise ValueError(f"--dtype: {folder}/config.json: {reason(error)}") from None
    return {name for name, _ in model.named_buffers()}


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a dense model, as `load_config` takes it. Raises ValueError for quantized weights,
    and for a link that leads out of the folder."""
    check_links(folder)
    config = read_json(folder / "config.json")
    if "quantization_config" in config:
        raise ValueError(f"{folder}/config.json: has a quantization_config, which the trained weights do not fit")
    if "text_config" in config:
        taken = load_config(folder, str(folder), cached=True)
        return config if taken.model_type == config.get("model_type") else dict(json.loads(taken.to_json_string()))
    return config


def check_config(folder: Path, config: dict[str, Any], expected: object) -> None:
    """Raise where config.json is not the one that `expected`, the sha256 beside the weights, was taken of. A value
    that was changed there makes another model of the same weights, and nothing else would tell."""
    if expected is not None and config_sha256(config) != expected:
        raise ValueError(f"{folder / 'config.json'}: was changed or damaged since the model was written; restore it")


def require_finite(value: Tensor, name: str, where: Path) -> None:
    """Raise unless every element is finite."""
    if count_not_finite(value):
        raise ValueError(f"{where}: {name} is not finite in {value.dtype}; try --dtype float32")
