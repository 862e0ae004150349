"""Source of an export: the tensors of the final model, one at a time, and the files that belong to them.

`open_source` chooses the kind of source. Each kind checks the tensors that it returns: a run's mask and masters against
each other, the bytes of a folder against the hashes beside them.
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

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.model_files import check_links
from sparseforge_ds.checkpoint.tensors import TensorSpec
from sparseforge_ds.config import LowRankConfig, QuantizeConfig, SparseForgeConfig
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.export.counting import count_not_finite
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import LOW_RANK, PROJECTION
from sparseforge_ds.model.loading_error import reason
from sparseforge_ds.model.registration import build_model, load_config
from sparseforge_ds.model.stored_config import config_sha256, configured_dtype, is_only_pruned
from sparseforge_ds.packed_format.packed_values import Grid

HEAD = ("pattern", "finished", "step", "source", "coverage", "config", "run")
"""Keys of `sparsity.json` about the origin of a model."""


_NOT_OF_MODEL = (
    *("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache", "architectures"),
    *("auto_map", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Entries of a config that may differ between two copies of one model."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Dtypes of an export, by their names in config.json."""


class Source(abc.ABC):
    """Source of final weights."""

    specs: dict[str, TensorSpec]
    """Shape and dtype of every tensor of the final model, in order, by saved name (`model.saved_names`)."""
    fused_name: Mapping[str, str] = MappingProxyType({})
    """Name of a tensor in the run, if it differs from the saved one: that of the fused weight of all experts."""
    prunable: dict[str, SparseWeight]
    """Tensors of `specs` that are in the pattern."""
    pattern: Pattern
    record: dict[str, Any]
    """Head of `sparsity.json`: format, dtype and `HEAD`. Plain JSON."""
    dtype: torch.dtype
    """Dtype of all parameters; buffers keep their own."""
    model_folder: Path
    """Folder with the tokenizer and the other files of the model."""
    model_config: dict[str, Any]
    """Content of config.json."""
    branches: dict[str, tuple[int, int]]
    """Shape of B, (out, rank), by the name of the module with a low-rank branch (SLoRB)."""
    quantize: QuantizeConfig | None = None
    """Grid that the weights of `prunable` were trained on; None if they were not quantized, or no codes are left."""
    unused: Sequence[str] = ()
    """Tensors of the files that are no part of the model, and are left out."""
    grid: Grid | None = None
    """Grid that the weights of a packed folder were rounded to; None if they were not."""
    folder: Path
    """Checkpoint or folder that was opened, for messages."""

    @property
    def low_rank(self) -> LowRankConfig:
        """Settings of the branches; ValueError if the config does not have them."""
        low_rank = None if (config := self._config) is None else config.low_rank
        if low_rank is None:
            raise ValueError(
                f"{self.folder}: has low-rank branches, and its config does not say of what k; export again"
            )
        return low_rank

    @property
    def branch_specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of the branches' learned tensors: B, (out, rank), and a learned P, (rank, in)."""
        specs = {}
        learned = bool(self.branches) and self.low_rank.learned
        for module, (outputs, rank) in self.branches.items():
            specs[f"{module}.{LOW_RANK}"] = TensorSpec((outputs, rank), self.dtype)
            if learned:
                weight = self.prunable[f"{module}.weight"]
                specs[f"{module}.{PROJECTION}"] = TensorSpec((rank, weight.shape[weight.input_axis]), self.dtype)
        return specs

    @property
    def branch_settings(self) -> dict[str, Any]:
        """Keys of the `quantization_config` of a packed folder that are for branches; empty if there are none."""
        if not self.branches:
            return {}
        settings: dict[str, Any] = {"low_rank": dict.fromkeys(self.branches, self.low_rank.k)}
        return settings | ({"low_rank_learned": True} if self.low_rank.learned else {})

    @property
    def _config(self) -> SparseForgeConfig | None:
        return recorded_config(self.folder, self.record.get("config"))

    @abc.abstractmethod
    def read(self, name: str) -> Tensor:
        """Return the final value of a tensor of `specs`, in memory of its own; several threads may read at once.

        Pruned elements are exactly +0.0.

        Raises:
            ValueError: the value is damaged, inconsistent, or not finite in its dtype.
        """

    def codes(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the codes of a quantized weight, int8 in its shape, and its scales (`mask.quantization`).

        Scales are bf16, one for every group of inputs, with as many on the input axis as there are groups.
        """
        raise KeyError(name)

    def read_branch(self, name: str) -> Tensor:
        """Return a tensor of `branch_specs`, in `dtype`."""
        raise KeyError(name)

    def check_bytes(self, workers: int | None = None) -> None:  # noqa: B027
        """Compare the checksums of the files that `read` does not check by itself."""


def origin_sections(path: Path, record: dict[str, Any], cure: str = "export again") -> dict[str, dict[str, Any]]:
    """Return the sections of a record about the origin of a model, after checking their types.

    Args:
        path: of the file that they come from, for messages.
        record: with keys of `HEAD`.
        cure: what to do about a damaged file.

    Raises:
        ValueError: an entry has another type than an export writes.
    """
    sections = {key: record.get(key) or {} for key in ("run", "config", "coverage", "source")}
    damaged = {key: not isinstance(section, dict) for key, section in sections.items()}
    if not damaged["run"]:
        run = sections["run"]
        step = record.get("step")
        texts = run.get("dataset") or []
        damaged["step"] = step is not None and type(step) is not int
        damaged["run.dataset"] = not isinstance(texts, list) or not all(isinstance(text, str) for text in texts)
        damaged["run.model"] = not isinstance(run.get("model", ""), str)
    if key := next((key for key, is_damaged in damaged.items() if is_damaged), None):
        raise ValueError(f"{path}: {key} is damaged; {cure}")
    return sections


def recorded_config(folder: Path, block: Any) -> SparseForgeConfig | None:
    """Return the `sparseforge` block that the `sparsity.json` of a folder records, or None if it has none.

    Raises:
        ValueError: the block is damaged; the message names the file.
    """
    if not isinstance(block, dict) or not block:
        return None
    try:
        return SparseForgeConfig.from_dict(block)
    except ValueError as error:
        raise ValueError(
            f"{folder / 'sparsity.json'}: config is damaged, or of another release ({error}); export again"
        ) from None


def choose_dtype(dtype: str, model_folder: Path, model_config: dict[str, Any]) -> torch.dtype:
    """Return the dtype of an export: one of `DTYPES`, or for "auto" that of config.json."""
    if dtype == "auto":
        dtype = configured_dtype(model_config) or "float32"
        return require_dtype(dtype, f"{model_folder / 'config.json'}: dtype {dtype!r}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r}: use one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def require_dtype(dtype: str, origin: str) -> torch.dtype:
    """Return the dtype of `DTYPES` that a file names.

    Raises:
        ValueError: an export has no such dtype; the message begins with its `origin`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{origin} cannot be exported; use one of {', '.join(DTYPES)}, such as --dtype float32")
    return DTYPES[dtype]


def buffer_names(folder: Path, origin: str) -> set[str]:
    """Return the names of a model's buffers, such as the biases of a router, which another dtype does not round.

    Args:
        folder: with config.json.
        origin: of the dtype, the beginning of error messages.

    Raises:
        ValueError: transformers has no class for the folder's config.json.
    """
    config = load_config(folder, f"{origin}: {folder}")
    try:
        with torch.device("meta"):
            model = build_model(config)
    except ValueError as error:
        raise ValueError(f"{origin}: {folder}/config.json: {reason(error)}") from None
    return {name for name, _ in model.named_buffers()}


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read the config.json of a dense model, or for some vision-language models its text model's part.

    Of a model that llm-compressor only pruned the `quantization_config` is left out: its weights are ordinary.

    Raises:
        ValueError: the weights are quantized, or a link leads out of the folder.
    """
    check_links(folder)
    config = read_json_object(folder / "config.json")
    if is_only_pruned(config):
        config = without_quantization(config)
    if "quantization_config" in config:
        raise ValueError(f"{folder}/config.json: has a quantization_config, which the trained weights do not fit")
    loaded = config_as_loaded(folder, config)
    return loaded if loaded is config else without_quantization(loaded)


def config_as_loaded(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json, or that of its text model's part if transformers takes that alone.

    Raises:
        ValueError: the config cannot be used.
    """
    if "text_config" not in config:
        return config
    loaded = load_config(folder, str(folder))
    return config if loaded.model_type == config.get("model_type") else json.loads(loaded.to_json_string())


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json without its `quantization_config`."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def check_config(folder: Path, config: dict[str, Any], expected: object) -> None:
    """Raise ValueError unless config.json has the `expected` sha256, which stands beside the weights.

    A value that was changed there would make another model of the same weights.
    """
    if expected is not None and config_sha256(config) != expected:
        raise ValueError(f"{folder / 'config.json'}: was changed or damaged since the model was written; restore it")


def require_same_model(folder: Path, own_folder: Path) -> None:
    """Raise ValueError unless config.json of `folder`, a value of `--model`, describes the model of `own_folder`."""
    settings = _model_settings(load_config(folder, f"--model {folder}").to_dict())
    own_settings = _model_settings(load_config(own_folder, str(own_folder)).to_dict())
    for key in sorted(settings.keys() | own_settings.keys()):
        if settings.get(key) != own_settings.get(key):
            raise ValueError(
                f"--model {folder}: its config.json has {key} {settings.get(key)!r:.100}, and the model was trained "
                f"with {own_settings.get(key)!r:.100} ({own_folder / 'config.json'}); leave out --model, or give the "
                "model that the weights belong to"
            )


def _model_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a config that decide what a model computes, in sections too."""
    settings = {key: value for key, value in config.items() if key not in _NOT_OF_MODEL}
    return {key: _model_settings(value) if isinstance(value, dict) else value for key, value in settings.items()}


def require_finite(value: Tensor, name: str, where: Path) -> None:
    """Raise ValueError unless every element is finite; `where` is the folder."""
    if count_not_finite(value):
        raise ValueError(f"{where}: {name} is not finite in {value.dtype}; try --dtype float32")
