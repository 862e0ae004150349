"""Writing of a model as a Hugging Face folder in one of three storages, one weight at a time in each worker.

`hf` is what plain transformers loads. In `packed24` a 2:4 weight is its kept values, under its own name with half its
inputs, and `<name>_positions` (`packed_format.packing.pack24`); transformers alone raises on these shapes. Rounded
values have `<name>_scale` beside them (`packed_format.packed_values`). `compressed-tensors` stores the codes of weights
that were trained quantized, zeros included, for engines that know no pattern. Beside the weights lies `sparsity.json`:
pattern, groups, non-zeros and sha256 of every weight, source step, resolved config.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.checkpoint.model_files import CHAT_TEMPLATES, check_links, is_legal_file
from sparseforge_ds.checkpoint.tensors import TensorSpec, hash_file, hash_tensor
from sparseforge_ds.export.adapter import ADAPTER_CONFIG, ADAPTER_TENSORS, write_adapter
from sparseforge_ds.export.compressed_tensors import pack_codes, packed_shape, quantization_config
from sparseforge_ds.export.source import Source
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.export.writer import NO_LIMIT, write_tensors
from sparseforge_ds.mask.quantization import scale_group
from sparseforge_ds.model.registration import build_model, load_config
from sparseforge_ds.model.stored_config import config_sha256
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, pair_codes, round_values, scale_shape
from sparseforge_ds.packed_format.packing import PACKED24, PACKED24_FORMAT, POSITIONS, pack24, packed24_shapes, unpack24

Format = Literal["hf", "packed24", "compressed-tensors"]

_COPIED = (".json", ".model", ".spm", ".txt", ".jinja", ".tiktoken")
"""Suffixes of a model's files that belong to every copy of it."""
_WRITTEN = ("trainer_state.json", "config.json", "sparsity.json", ADAPTER_CONFIG)


def write_model(
    source: Source,
    folder: Path,
    format: Format = "hf",
    max_shard_bytes: int = NO_LIMIT,
    workers: int | None = None,
    grid: Grid | None = None,
) -> dict[str, Any]:
    """Write all files of the model, read all bytes back, and verify the folder as `sparseforge verify` does.

    Masks, masters and finiteness are checked as a weight is read. Its hash is of the bytes that are written, and its
    groups are counted in the bytes that are read back.

    Args:
        source: of the weights.
        folder: exists and is empty.
        format: storage of the folder.
        max_shard_bytes: most bytes of a file.
        workers: threads.
        grid: to round packed values to; None to keep them.

    Returns:
        The content of `sparsity.json`, whose `proof` is null. Hashes are of the weights in their dense shapes, after
        rounding; `error` is what rounding changed, relative to the weight.

    Raises:
        ValueError: the source is damaged, a weight is not finite in its dtype, or the folder does not verify.
    """
    rows: dict[str, dict[str, Any]] = {}
    packed = format == "packed24"
    branches = source.branch_specs if packed else {}

    def make(name: str) -> dict[str, Tensor]:
        """Read one tensor, note its row, and return it as it is stored."""
        # Read the tensor as the source has it, dense.
        value = source.read_branch(name) if name in branches else source.read(name)
        weight = source.prunable.get(name)
        row: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        parts = {name: value}
        # Turn a pruned weight into what the format stores. With a grid the written value is the rounded one.
        if weight is not None and packed:
            if grid is None:
                values, positions = pack24(value, weight.input_axis)
                parts = {name: values, name + POSITIONS: positions}
            else:
                values, positions, scale = _rounded(source, name, value, grid)
                parts = {name: values, name + POSITIONS: positions, name + SCALE: scale}
                exact = value
                value = unpack24(values, positions, scale, exact.dtype)
                row |= {"error": relative_error(value, exact), "scale_sha256": hash_tensor(scale)}
        if weight is not None and format == "compressed-tensors":
            parts = _coded(source, name, value)
        # The row holds the hash of what a reader of the folder is going to see.
        row["sha256"] = hash_tensor(value)
        if name in source.fused_name:
            row["fused_name"] = source.fused_name[name]
        if weight is not None:
            row["input_axis"] = weight.input_axis
        rows[name] = row
        return parts

    specs = {**_stored_specs(source, format, grid), **branches}
    # The largest tensors come first, so that the workers end together; equal ones stay in the order of the files.
    sizes = source.specs | branches
    items = sorted(sizes, key=lambda name: -sizes[name].nbytes)
    write_tensors(folder, "model", specs, make, items, max_shard_bytes, workers)
    # Branches of a packed folder are among its weights; else they are an adapter.
    adapter: dict[str, Any] = {"adapter": None}
    if source.branches and not packed:
        write_adapter(source, folder)
        adapter = {"adapter": ADAPTER_TENSORS, "adapter_sha256": hash_file(folder / ADAPTER_TENSORS)}
        adapter["adapter_config_sha256"] = hash_file(folder / ADAPTER_CONFIG)
    # Config, tokenizer and the record beside the weights.
    quantization: dict[str, Any] = {"quant_method": PACKED24, "format": PACKED24_FORMAT}
    if branches:
        quantization |= source.branch_settings
    if grid is not None:
        quantization |= stored_grid(grid)
    if format == "compressed-tensors":
        assert source.quantize is not None
        quantization = quantization_config(source.quantize, _inputs_of_scale(source), dense_linears(source))
    copy_model_files(source, folder, None if format == "hf" else quantization)
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
        record |= stored_grid(grid)
    if grid is not None and source.quantize is None:  # rounded now: the run's score is not that of these values
        record["run"] = {key: value for key, value in (record.get("run") or {}).items() if key != "evaluation"}
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
    """Copy tokenizer, generation settings, chat templates, licence and the like.

    These are the legal files of the model's folder, and its files with one of the suffixes of `_COPIED`. Weights with
    their index, config.json and what an export writes itself are not copied, nor is code.

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
        (folder / CHAT_TEMPLATES).mkdir()  # copytree would copy its mode, which may forbid writing
        for file in sorted(templates.iterdir()):
            if file.is_file():
                shutil.copyfile(file, folder / CHAT_TEMPLATES / file.name)


def stored_grid(grid: Grid) -> dict[str, Any]:
    """Return the keys of a grid in config.json and `sparsity.json`."""
    return {"values": grid.name} | ({} if grid.group_size is None else {"group_size": grid.group_size})


def _rounded(source: Source, name: str, value: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values, positions and scales of a weight; a run that was trained quantized has codes of its own.

    Args:
        source: of the weight.
        name: of the weight.
        value: the weight, dense.
        grid: of the result.

    Raises:
        ValueError: codes and scales do not give `value`, or it has no place on the grid.
    """
    axis = source.prunable[name].input_axis
    if source.quantize is None:
        values, positions = pack24(value, axis)
        rounded, scale = round_values(values, axis, grid)
        return rounded, positions, scale
    code, scale = source.codes(name)
    codes, positions = pack24(code.float(), axis)
    values = pair_codes(codes.to(torch.int8), axis)
    if not torch.equal(unpack24(values, positions, scale, value.dtype), value):
        raise ValueError(f"{name}: its codes and scales are not the weight; use another checkpoint")
    return values, positions, scale


def read_rounded(source: Source, name: str, grid: Grid) -> Tensor:
    """Return a weight as `write_model` with `grid` writes it, in its dense shape and the dtype of the source."""
    value = source.read(name)
    if name not in source.prunable:
        return value
    return unpack24(*_rounded(source, name, value, grid), value.dtype)


def relative_error(rounded: Tensor, exact: Tensor) -> float:
    """Return |rounded - exact| / |exact|, by Euclidean norms; 0 of zeros."""
    size = torch.linalg.vector_norm(exact.float(), dtype=torch.float64).item()
    error = torch.linalg.vector_norm(rounded.float() - exact.float(), dtype=torch.float64).item()
    return error / size if size else 0.0


def _coded(source: Source, name: str, value: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a weight in `pack-quantized`; `value` is what they must give.

    Raises:
        ValueError: the dtype of the export does not hold its scales.
    """
    assert source.quantize is not None
    module = name.removesuffix(".weight")
    code_OI, scale_OG = source.codes(name)
    scale_OG = scale_OG.to(value.dtype)
    size = code_OI.shape[1] // scale_OG.shape[1]
    if not torch.equal(code_OI.to(value.dtype) * scale_OG.repeat_interleave(size, dim=1), value):
        raise ValueError(f"{name}: {value.dtype} does not hold its scales; export it with --dtype bfloat16")
    return {
        f"{module}.weight_packed": pack_codes(code_OI, source.quantize.bits),
        f"{module}.weight_scale": scale_OG,
        f"{module}.weight_shape": torch.tensor(code_OI.shape),
    }


def _inputs_of_scale(source: Source) -> int | None:
    """Return the inputs that share a scale in all weights of a quantized source; None for those of an output."""
    assert source.quantize is not None
    if source.quantize.group_size is None:
        return None
    weight = next(iter(source.prunable.values()))
    return scale_group(source.pattern, source.quantize.group_size, weight.shape[-1]).members


def dense_linears(source: Source) -> list[str]:
    """Return the names of the model's linear layers whose weights are not in the pattern."""
    config = load_config(source.model_folder, str(source.model_folder))
    with torch.device("meta"):
        model = build_model(config)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linears if f"{name}.weight" not in source.prunable]


def _stored_specs(source: Source, format: Format, grid: Grid | None) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor in a folder, branches excepted."""
    specs: dict[str, TensorSpec] = {}
    for name, spec in source.specs.items():
        if name not in source.prunable or format == "hf":
            specs[name] = spec
        elif format == "compressed-tensors":
            # compressed-tensors: codes, a scale a group or row, and the shape.
            assert source.quantize is not None
            module = name.removesuffix(".weight")
            size = _inputs_of_scale(source) or spec.shape[1]
            packed = packed_shape(spec.shape, source.quantize.bits)
            specs[f"{module}.weight_packed"] = TensorSpec(packed, torch.int32)
            specs[f"{module}.weight_scale"] = TensorSpec((spec.shape[0], spec.shape[1] // size), spec.dtype)
            specs[f"{module}.weight_shape"] = TensorSpec((2,), torch.int64)
        else:
            # packed24: kept values, their positions, and the scale of rounded values.
            axis = source.prunable[name].input_axis
            values, positions = packed24_shapes(spec.shape, axis, None if grid is None else grid.dtype)
            specs[name] = TensorSpec(values, spec.dtype if grid is None else grid.dtype)
            specs[name + POSITIONS] = TensorSpec(positions, torch.uint8)
            if grid is not None:
                specs[name + SCALE] = TensorSpec(scale_shape(values, axis, grid), grid.scale_dtype)
    return specs


def describe_values(grid: Grid, errors: dict[str, float]) -> str:
    """Return a line on rounded values: their grid, and what rounding changed, as a share of each weight."""
    line = f"values: {grid}"
    if not errors:
        return line
    if not any(errors.values()):
        return f"{line}; rounding changed no weight"
    worst = max(errors, key=lambda name: errors[name])
    mean = (sum(error**2 for error in errors.values()) / len(errors)) ** 0.5
    return f"{line}; rounding changed a weight by {mean:.2%} (root mean square), at most {errors[worst]:.2%} ({worst})"
