"""Writing of a model as a Hugging Face folder in one of two storages, one weight at a time in each worker.

`hf` is what plain transformers loads. In `packed24` a 2:4 weight is its kept values, under its own name with half its
inputs, and `<name>_positions` (`mask.packing.pack24`); transformers alone raises on these shapes. 8-bit values have
`<name>_scale` beside them (`mask.packed_values`). Beside the weights lies `sparsity.json`: pattern, groups, non-zeros
and sha256 of every weight, source step, resolved config.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.checkpoint.model_files import CHAT_TEMPLATES, check_links, is_legal_file
from sparseforge_ds.checkpoint.tensors import TensorSpec, hash_file, hash_tensor
from sparseforge_ds.export.adapter import CONFIG, TENSORS, write_adapter
from sparseforge_ds.export.source import Source
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.export.writer import NO_LIMIT, write_tensors
from sparseforge_ds.mask.packed_values import GRIDS, SCALE, round_values, scale_shape
from sparseforge_ds.mask.packing import PACKED24, PACKED24_FORMAT, POSITIONS, pack24, packed24_shapes, unpack24
from sparseforge_ds.model.stored_config import config_sha256

_COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken")
"""Suffixes of a model's files that belong to every copy of it."""
_WRITTEN = ("trainer_state.json", "config.json", "sparsity.json", CONFIG)


def write_model(
    source: Source,
    folder: Path,
    packed: bool = False,
    max_shard_bytes: int = NO_LIMIT,
    workers: int | None = None,
    grid: str | None = None,
) -> dict[str, Any]:
    """Write all files of the model, read all bytes back, and verify the folder as `sparseforge verify` does.

    Masks, masters and finiteness are checked as a weight is read. Its hash is of the bytes that are written, and its
    groups are counted in the bytes that are read back.

    Args:
        source: of the weights.
        folder: exists and is empty.
        packed: True for `packed24`, False for `hf`.
        max_shard_bytes: most bytes of a file.
        workers: threads.
        grid: a key of `GRIDS`, to round packed values to 8 bits; None to keep them.

    Returns:
        The content of `sparsity.json`, whose `proof` is null. Hashes are of the weights in their dense shapes, after
        rounding; `error` is what rounding changed, relative to the weight.

    Raises:
        ValueError: the source is damaged, a weight is not finite in its dtype, or the folder does not verify.
    """
    rows: dict[str, dict[str, Any]] = {}
    branches = source.branch_specs if packed else {}

    def make(name: str) -> dict[str, Tensor]:
        """Read one tensor, note its row, and return it as it is stored."""
        value = source.read_branch(name) if name in branches else source.read(name)
        weight = source.prunable.get(name)
        row: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        parts = {name: value}
        if weight is not None and packed:
            values, positions = pack24(value, weight.input_axis)
            parts = {name: values, name + POSITIONS: positions}
            if grid is not None:
                exact = value
                parts[name], parts[name + SCALE] = round_values(values, weight.input_axis, GRIDS[grid])
                value = unpack24(parts[name], positions, parts[name + SCALE], exact.dtype)
                row |= {"error": relative_error(value, exact), "scale_sha256": hash_tensor(parts[name + SCALE])}
        row["sha256"] = hash_tensor(value)
        if name in source.fused_name:
            row["fused_name"] = source.fused_name[name]
        if weight is not None:
            row["input_axis"] = weight.input_axis
        rows[name] = row
        return parts

    specs = {**(_packed_specs(source, grid) if packed else source.specs), **branches}
    # The largest tensors come first, so that the workers end together; equal ones stay in the order of the files.
    items = sorted([*source.specs, *branches], key=lambda name: -specs[name].nbytes)
    write_tensors(folder, "model", specs, make, items, max_shard_bytes, workers)
    # Branches of a packed folder are among its weights; else they are an adapter.
    adapter: dict[str, Any] = {"adapter": None}
    if source.branches and not packed:
        write_adapter(source, folder)
        adapter = {"adapter": TENSORS, "adapter_sha256": hash_file(folder / TENSORS)}
        adapter["adapter_config_sha256"] = hash_file(folder / CONFIG)
    # Config, tokenizer and the record beside the weights.
    quantization: dict[str, Any] = {"quant_method": PACKED24, "format": PACKED24_FORMAT}
    if branches:
        quantization["low_rank"] = dict.fromkeys(source.branches, source.low_rank.k)
        if source.low_rank.learned:
            quantization["low_rank_learned"] = True
    if grid is not None:
        quantization["values"] = grid
    copy_model_files(source, folder, quantization if packed else None)
    record = {
        **source.record,
        **adapter,
        "config_sha256": config_sha256(source.model_config),
        "weights": {name: rows[name] for name in source.specs if name in source.prunable},
        "dense": {name: rows[name] for name in source.specs if name not in source.prunable},
        "branches": {key: rows[key] for key in branches},
        "proof": None,
    }
    if grid is not None:
        record["values"] = grid
    write_json(folder / "sparsity.json", record)
    # What lies on the disk is what is verified and counted.
    report = check_folder(folder, workers=workers)
    if not report.ok:
        violating = [row.name for row in report.rows if row.violations]
        first = next(iter([*report.notes, *report.missing, *report.changed, *violating]), "no weight in the pattern")
        raise ValueError(f"{folder}: the written folder does not verify ({report.violations} violations, {first})")
    for counts in report.rows:
        rows[counts.name] |= {"groups": counts.groups, "nonzeros": counts.nonzeros}
    record["bytes"] = asdict(report.size)
    return record


def copy_model_files(source: Source, folder: Path, quantization_config: dict[str, Any] | None = None) -> None:
    """Write config.json with the exported dtype, and copy tokenizer, licence and the like."""
    copy_other_files(source.model_folder, folder)
    # auto_map names Python files, which are not copied.
    config = {key: value for key, value in source.model_config.items() if key not in ("torch_dtype", "auto_map")}
    config["dtype"] = str(source.dtype).removeprefix("torch.")
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    write_json(folder / "config.json", config)


def copy_other_files(model_folder: Path, folder: Path) -> None:
    """Copy tokenizer, licence and the like: all files but weights, config.json and those that an export writes.

    Raises:
        ValueError: a link leads out of the model's folder.
    """
    check_links(model_folder)
    for file in sorted(model_folder.iterdir()):
        has_weights = ".safetensors" in file.name or ".bin" in file.name
        belongs = file.suffix in _COPIED or is_legal_file(file.name)
        if file.is_file() and belongs and not has_weights and file.name not in _WRITTEN:
            shutil.copyfile(file, folder / file.name)
    if (templates := model_folder / CHAT_TEMPLATES).is_dir():
        shutil.copytree(templates, folder / CHAT_TEMPLATES)


def read_rounded(source: Source, name: str, grid: str) -> Tensor:
    """Return a weight as `write_model` with `grid` writes it, in its dense shape and the dtype of the source."""
    value = source.read(name)
    if name not in source.prunable:
        return value
    axis = source.prunable[name].input_axis
    values, positions = pack24(value, axis)
    codes, scale = round_values(values, axis, GRIDS[grid])
    return unpack24(codes, positions, scale, value.dtype)


def relative_error(rounded: Tensor, exact: Tensor) -> float:
    """Return |rounded - exact| / |exact|, by Euclidean norms; 0 of zeros."""
    size = torch.linalg.vector_norm(exact.float(), dtype=torch.float64).item()
    error = torch.linalg.vector_norm(rounded.float() - exact.float(), dtype=torch.float64).item()
    return error / size if size else 0.0


def _packed_specs(source: Source, grid: str | None) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor in a packed folder."""
    specs: dict[str, TensorSpec] = {}
    for name, spec in source.specs.items():
        specs[name] = spec
        if name in source.prunable:
            axis = source.prunable[name].input_axis
            values, positions = packed24_shapes(spec.shape, axis)
            specs[name] = TensorSpec(values, spec.dtype if grid is None else GRIDS[grid])
            specs[name + POSITIONS] = TensorSpec(positions, torch.uint8)
            if grid is not None:
                specs[name + SCALE] = TensorSpec(scale_shape(values, axis), torch.float32)
    return specs
