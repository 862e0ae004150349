"""Reading of an exported folder's tensors in their dense shapes, for each kind of storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec, hash_tensor
from sparseforge_ds.export.adapter import ADAPTER_CONFIG, ADAPTER_STEM, ADAPTER_TENSORS
from sparseforge_ds.export.compressed_tensors import QuantizedWeights
from sparseforge_ds.export.source import DTYPES
from sparseforge_ds.export.unused import divide
from sparseforge_ds.model.basis import PERMUTATION
from sparseforge_ds.model.families import BRANCH
from sparseforge_ds.model.sound_weights import require_float_weights
from sparseforge_ds.model.stored_config import configured_dtype, is_packed_config, is_quantized
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, require_grid, values_per_element
from sparseforge_ds.packed_format.packing import (
    PACKED24,
    PACKED24_FORMAT,
    POSITIONS,
    packed24_axis,
    require_packed_dtypes,
    require_scale_shape,
    unpack24,
)

_DTYPES = {**DTYPES, "float64": torch.float64}


class StoredWeights:
    """Tensors of a Hugging Face folder: ordinary safetensors, packed24, or quantized by llm-compressor.

    Several threads may read at once.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        """Read the headers of all files; `config` is the content of config.json."""
        self.folder = folder
        self._tensors = tensors = TensorFolder(folder)
        # A packed weight is stored as values and positions, a quantized one as several parts.
        self.packed = is_packed_config(config)
        positions = {name + POSITIONS for name in tensors.specs} & tensors.specs.keys()
        if positions and not self.packed:
            raise ValueError(
                f"{folder}: has packed weights, {min(positions)} among them, and the quantization_config of its "
                f"config.json does not say so (quant_method {PACKED24}): it is damaged; download or export it again"
            )
        self._packed = {name.removesuffix(POSITIONS) for name in positions}
        self.grid = _grid(folder, config) if self.packed else None
        """Grid of rounded values, by config.json; or None."""
        self._dtype = _DTYPES.get(configured_dtype(config) or "float32", torch.float32)
        scales = {name + SCALE for name in self._packed} & tensors.specs.keys() if self.grid else set()
        self._quantized = QuantizedWeights(folder, config, tensors) if is_quantized(config) else None
        parts = positions | scales | (self._quantized.belongs if self._quantized else set())
        self.specs = {name: self._dense_spec(name) for name in tensors.specs if name not in parts}
        """Dense shape and dtype of every weight."""
        if self._quantized:
            self.specs |= self._quantized.specs
        self._counted = tensors.specs
        self.unused: list[str] = []
        """Names of tensors that transformers does not load."""
        if not (folder / "sparsity.json").is_file():
            self.specs, self.unused = divide(self.specs, config)
            self._counted, _ = divide(tensors.specs, config)

    @property
    def size(self) -> Size:
        """Bytes of all tensors but the unused ones; branches count among the weights or in an adapter."""
        branches = {name: spec for name, spec in self._counted.items() if name.endswith(BRANCH)}
        has_adapter = (self.folder / ADAPTER_TENSORS).is_file()
        adapter = TensorFolder(self.folder, ADAPTER_STEM).specs if has_adapter else {}
        return Size(
            weights=sum(spec.nbytes for name, spec in self._counted.items() if name not in branches),
            branches=sum(spec.nbytes for spec in (*branches.values(), *adapter.values())),
            dense=sum(spec.nbytes for name, spec in self.specs.items() if name not in branches),
        )

    @property
    def quantized(self) -> int:
        """Number of quantized weights."""
        return len(self._quantized.specs) if self._quantized else 0

    def read(self, name: str) -> Tensor:
        """Return one weight in its dense shape, in memory of its own."""
        if self._quantized and name in self._quantized.specs:
            return self._quantized.read(name)
        value = self._tensors.read(name)
        if name not in self._packed:
            return value
        try:
            scale = self._tensors.read(name + SCALE) if self.grid else None
            return unpack24(value, self._tensors.read(name + POSITIONS), scale, self._dtype)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {name}: {error}") from None

    def scale_sha256(self, name: str) -> str | None:
        """Return the sha256 of a weight's scales; None for a weight without. The weight alone rounds them away."""
        return hash_tensor(self._tensors.read(name + SCALE)) if self.grid and name in self._packed else None

    def stream(self, name: str, elements: int) -> Iterator[Tensor]:
        """Yield one weight as chunks of `elements`, (n,) each. A chunk's memory is used again for the next one."""
        if name in self._packed or (self._quantized and name in self._quantized.specs):
            yield from self.read(name).reshape(-1).split(elements)
        else:
            yield from self._tensors.stream(name, elements)

    def _dense_spec(self, name: str) -> TensorSpec:
        """Return the dense shape and dtype of an ordinary or a packed weight."""
        spec = self._tensors.specs[name]
        if name not in self._packed:
            return spec
        # A packed weight has positions beside its values, and rounded values a scale: shapes must agree.
        positions = self._tensors.specs[name + POSITIONS]
        scale = self._tensors.specs.get(name + SCALE)
        try:
            axis = packed24_axis(spec.shape, positions.shape, None if self.grid is None else self.grid.dtype)
            if self.grid is None:
                require_packed_dtypes(spec.dtype, positions.dtype)
            elif scale is None:
                raise ValueError(f"is there without {name}{SCALE}; export or download it again")
            else:
                if spec.dtype != self.grid.dtype:
                    raise ValueError(f"values are stored as {spec.dtype}, and config.json says {self.grid.name}")
                require_packed_dtypes(spec.dtype, positions.dtype, scale.dtype)
                require_scale_shape(spec.shape, scale.shape, axis, self.grid)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {name}: {error}") from None
        # Half of the weights are kept, and one stored element may hold several of them.
        shape = list(spec.shape)
        shape[axis] *= 2 * values_per_element(spec.dtype)
        return TensorSpec(tuple(shape), self._dtype if self.grid else spec.dtype)


def _grid(folder: Path, config: dict[str, Any]) -> Grid | None:
    """Return the grid of a packed folder's quantization_config. Raises ValueError where it is damaged."""
    stored_format = config["quantization_config"].get("format", PACKED24_FORMAT)
    if type(stored_format) is not int or stored_format != PACKED24_FORMAT:
        raise ValueError(
            f"{folder / 'config.json'}: quantization_config has format {stored_format!r}, and this version of "
            f"sparseforge_ds reads {PACKED24_FORMAT}; upgrade it, or export again"
        )
    try:
        return require_grid(*map(config["quantization_config"].get, ("values", "group_size")))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None


def open_dense_files(
    folder: Path, config: dict[str, Any], *, allow_permuted: bool = True
) -> tuple[TensorFolder, dict[str, TensorSpec], list[str]]:
    """Open the tensors of a dense model, and divide them by its config.json.

    Returns:
        The tensors, the specs of those that transformers loads, and the names of the others.

    Raises:
        ValueError: the folder is sparse, permuted (unless that is allowed) or has an adapter, or a weight is no float.
    """
    states = {"sparsity.json": "is sparse", ADAPTER_CONFIG: "has an adapter"}
    for file, state in (states if allow_permuted else states | {PERMUTATION: "is permuted"}).items():
        if (folder / file).exists():
            raise ValueError(f"{folder}: {state} already ({file}); start from the dense model that it was made of")
    tensors = TensorFolder(folder)
    require_float_weights({name: spec.dtype for name, spec in tensors.specs.items()}, folder, str(folder))
    return tensors, *divide(tensors.specs, config)


@dataclass(frozen=True)
class Size:
    """Bytes of a model's tensors, in files."""

    weights: int
    """Bytes of the weights as they are stored."""
    branches: int
    """Bytes of the low-rank branches, with the fixed matrices of a PEFT adapter."""
    dense: int
    """Bytes of the weights in their dense shapes."""

    def __str__(self) -> str:
        stored = self.weights + self.branches
        parts = f" ({self.branches:,} of them low-rank branches)" if self.branches else ""
        return f"{stored:,} bytes{parts}, {stored / max(1, self.dense):.4f} of the dense model's {self.dense:,}"


def read_sparsity(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `sparsity.json`.

    Raises:
        ValueError: it is missing or damaged.
    """
    if not (folder / "sparsity.json").is_file():
        raise ValueError(f"{folder}: has no sparsity.json; give a folder that consolidate or export wrote")
    return read_json_object(folder / "sparsity.json")


def listed_weights(folder: Path, sparsity: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the sections `weights`, `dense` and `branches` of a sparsity.json, each by name; empty if it has none.

    Raises:
        ValueError: a section is not a JSON object of objects, or a sparse weight has no input axis.
    """
    keys = ("weights", "dense", "branches")
    weights, dense, branches = sections = [sparsity.get(key, {}) for key in keys]
    for key, section in zip(keys, sections, strict=True):
        if not isinstance(section, dict) or not all(isinstance(entry, dict) for entry in section.values()):
            raise ValueError(f"{folder / 'sparsity.json'}: {key} is damaged; export again")
    if any(entry.get("input_axis") not in (-1, -2) for entry in weights.values()):
        raise ValueError(f"{folder / 'sparsity.json'}: weights is damaged; export again")
    return weights, dense, branches


def reads_as(spec: TensorSpec, entry: dict[str, Any]) -> bool:
    """Return True if a tensor has the shape and dtype of its entry in `sparsity.json`, which no hash covers."""
    dtype = str(spec.dtype).removeprefix("torch.")
    return entry.get("shape", list(spec.shape)) == list(spec.shape) and entry.get("dtype", dtype) == dtype
