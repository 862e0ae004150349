"""`packed24`: a 2:4 model in 0.5625 of the bf16 bytes of its sparse weights.

A sparse weight is stored as its kept values, under its own name with half its inputs, and `<name>_positions`, two bits
for each (see `mask.packing.pack24`). Everything else is stored as it is. `import sparseforge_ds` makes transformers
load it; transformers alone raises, as the shapes are not the model's (see `model.packed24`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec, hash_tensor, write_tensors
from sparseforge_ds.export.adapter import adapter_record, write_branches
from sparseforge_ds.export.card import write_card
from sparseforge_ds.export.model_files import copy_model_files
from sparseforge_ds.export.source import Source, config_sha256
from sparseforge_ds.export.weight_report import check_weight
from sparseforge_ds.mask.packing import (
    PACKED24,
    PACKED24_FORMAT,
    POSITIONS,
    pack24,
    packed24_axis,
    packed24_shapes,
    unpack24,
)
from sparseforge_ds.mask.pattern import NM


def require_24(source: Source) -> None:
    """Raise for a pattern that has no such storage."""
    if source.pattern != NM(2, 4):
        raise ValueError(f"the packed24 format holds 2:4, the pattern here is {source.pattern}; use --format hf")


def write_packed(source: Source, folder: Path, shard_bytes: int, progress: bool) -> dict[str, Any]:
    """Write the model into `folder`, and read every packed weight back.

    Returns:
        What belongs into `sparsity.json`. The hashes are those of the dense weights, as in the `hf` export.

    Raises:
        ValueError: what was written does not unpack to the source's weight.
    """
    specs: dict[str, TensorSpec] = {}
    for name, spec in source.specs.items():
        if name in source.prunable:
            values, positions = packed24_shapes(spec.shape, source.prunable[name].input_axis)
            specs[name] = TensorSpec(values, spec.dtype)
            specs[name + POSITIONS] = TensorSpec(positions, torch.uint8)
        else:
            specs[name] = spec
    rows: dict[str, dict[str, Any]] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, spec in tqdm(source.specs.items(), unit=" weights", disable=not progress, file=sys.stderr):
            value = source.read(name)
            rows[name] = {"shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}
            if name in source.known_as:
                rows[name]["known_as"] = source.known_as[name]
            if name not in source.prunable:
                yield name, value
                continue
            axis = source.prunable[name].input_axis
            counted = check_weight(value, name, source.pattern, axis)
            rows[name] |= {"input_axis": axis, "groups": counted.groups, "nonzeros": counted.nonzeros}
            rows[name]["sha256"] = hash_tensor(value)
            values, positions = pack24(value, axis)
            yield name, values
            yield name + POSITIONS, positions

    hashes = write_tensors(folder, "model", specs, tensors(), shard_bytes)
    written = TensorFolder(folder)
    for name, entry in tqdm(rows.items(), unit=" weights checked", disable=not progress, file=sys.stderr):
        entry.setdefault("sha256", hashes[name])
        if hash_tensor(read_packed(written, name)) != entry["sha256"]:
            raise ValueError(f"{folder}: {name} does not unpack to the weight that was packed")
    if source.branches:
        write_branches(source, folder)
        write_card(source, folder, packed=True)
    copy_model_files(source, folder, {"quant_method": PACKED24, "format": PACKED24_FORMAT})
    sparse = sum(source.specs[name].nbytes for name in source.prunable)
    packed = sum(specs[name].nbytes + specs[name + POSITIONS].nbytes for name in source.prunable)
    dense, whole = (sum(spec.nbytes for spec in these.values()) for these in (source.specs, specs))
    return {
        **source.record,
        "storage": {
            "name": "packed24",
            "sparse_weights": {"bytes": packed, "dense_bytes": sparse, "ratio": packed / sparse},
            "model": {"bytes": whole, "dense_bytes": dense, "ratio": whole / dense},
        },
        **adapter_record(source, folder),
        "config_sha256": config_sha256(source.model_config),
        "weights": {name: rows[name] for name in rows if name in source.prunable},
        "dense": {name: rows[name] for name in rows if name not in source.prunable},
    }


def is_packed(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a packed24 folder."""
    held = config.get("quantization_config")
    return isinstance(held, dict) and held.get("quant_method") == PACKED24


def logical_specs(tensors: TensorFolder) -> dict[str, TensorSpec]:
    """Name, dense shape and dtype of every weight of a packed folder.

    Raises:
        ValueError: positions without values, or shapes that do not belong together.
    """
    specs = {}
    for name, spec in tensors.specs.items():
        if name.endswith(POSITIONS) and name.removesuffix(POSITIONS) in tensors.specs:
            continue
        if name + POSITIONS in tensors.specs:
            axis = _axis(tensors, name)
            shape = list(spec.shape)
            shape[axis] *= 2
            spec = TensorSpec(tuple(shape), spec.dtype)
        specs[name] = spec
    return specs


def read_packed(tensors: TensorFolder, name: str) -> Tensor:
    """A weight of a packed folder in its dense shape; one that is not packed is read as it is.

    Raises:
        ValueError: it is damaged.
    """
    value = tensors.read(name)
    if name + POSITIONS not in tensors.specs:
        return value
    _axis(tensors, name)
    try:
        return unpack24(value, tensors.read(name + POSITIONS))
    except ValueError as error:
        raise ValueError(f"{tensors.folder}: {name}: {error}") from None


def _axis(tensors: TensorFolder, name: str) -> int:
    values, positions = tensors.specs[name].shape, tensors.specs[name + POSITIONS].shape
    try:
        return packed24_axis(values, positions)
    except ValueError as error:
        raise ValueError(f"{tensors.folder}: {name}: {error}") from None
