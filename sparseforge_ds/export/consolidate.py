"""From a run to a 2:4 Hugging Face model, offline, one weight at a time.

    sparseforge consolidate RUN OUT

OUT is an ordinary folder (safetensors, config, tokenizer) that `AutoModelForCausalLM.from_pretrained` loads without
this package, plus `sparsity.json` (pattern, groups, non-zeros and sha256 of every weight, source step, resolved config)
and, for a run with a low-rank branch, `adapter/`, a PEFT LoRA adapter that belongs on top.

A prunable weight becomes mask * dense with exact +0.0. In a finished run the mask is binary and this is what the
network trained with. The mask of an unfinished run is projected: the N largest of each group stay, ties going to the
larger dense weight; the model is then worse than what the run is going to give. The folder is written under a temporary
name, verified, and renamed at the end: OUT is never half a model.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.checkpoint.tensors import TensorSpec, parse_size, write_tensors
from sparseforge_ds.export.adapter import write_adapter
from sparseforge_ds.export.source import Prunable, Source
from sparseforge_ds.export.verify import check_folder, check_weight
from sparseforge_ds.mask.pattern import Pattern, top_n
from sparseforge_ds.model.families import LOW_RANK

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken")


def export(
    source: Source,
    out: str | Path,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    progress: bool = False,
) -> dict[str, Any]:
    """Write the Hugging Face folder.

    Args:
        out: a folder that does not exist yet, or is empty.
        dtype: one of `DTYPES`, or auto: what config.json says.
        max_shard_size: largest safetensors file, like 5GB.

    Returns:
        What `sparsity.json` holds.

    Raises:
        ValueError: `out` is in use or cannot be written, or a weight is not finite in `dtype`; nothing is left behind.
    """
    out = Path(out)
    target = _dtype(source, dtype)
    shard_bytes = parse_size(max_shard_size)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder; give another name")
    unfinished = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        sparsity = _write(source, unfinished, target, shard_bytes, progress)
        report = check_folder(unfinished)
        if not report.ok:
            worst = next((row.name for row in report.rows if row.violations), "")
            raise ValueError(f"{out}: the written folder does not verify ({report.violations} violations {worst})")
        unfinished.replace(out)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error}); nothing was left behind") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sparsity


def sparse_weight(checkpoint: Checkpoint, weight: Prunable, pattern: Pattern) -> tuple[Tensor, bool]:
    """hard(mask) * dense in fp32 (design eq. 11), dead members exactly +0.0.

    Returns:
        (the weight in its full shape, whether its mask was binary and in the pattern already).
    """
    dense = checkpoint.state(weight.name, "dense").float()
    mask_GM = pattern.to_groups(
        checkpoint.state(weight.name, "mask").float().reshape(-1), weight.shape, weight.input_axis
    )
    dense_GM = pattern.to_groups(dense.reshape(-1), weight.shape, weight.input_axis)
    binary = bool(((mask_GM == 0) | (mask_GM == 1)).all())
    finished = binary and bool((mask_GM.sum(1) == pattern.kept).all())
    if finished:
        kept_GM = mask_GM == 1
    else:
        last_G1 = torch.topk(mask_GM, pattern.kept, dim=1).values[:, -1:]
        rank_GM = dense_GM.abs().masked_fill(mask_GM > last_G1, torch.inf).masked_fill(mask_GM < last_G1, -1.0)
        kept_GM = top_n(rank_GM, pattern.kept)
    value_GM = torch.where(kept_GM, dense_GM, 0.0)
    value = pattern.from_groups(value_GM, weight.shape, weight.input_axis).view(weight.shape)
    if finished and not torch.equal(value, checkpoint.weight(weight.name)):
        raise ValueError(
            f"{checkpoint.folder}: the master of {weight.name} is not mask * dense although its mask is frozen; "
            "the checkpoint is inconsistent, use another one"
        )
    return value, finished


def _write(source: Source, folder: Path, dtype: torch.dtype, shard_bytes: int, progress: bool) -> dict[str, Any]:
    """Everything into `folder`, which exists and is empty."""
    checkpoint, pattern = source.checkpoint, source.config.parsed_pattern
    names = [name for name in checkpoint.shapes if name.rpartition(".")[2] != LOW_RANK]
    origin = {name: name for name in names}
    if not source.model_config.get("tie_word_embeddings", False):
        origin |= {alias: name for alias, name in checkpoint.aliases.items() if name in origin}
    specs = {
        name: TensorSpec(checkpoint.shapes[real], _stored(checkpoint, real, dtype)) for name, real in origin.items()
    }
    rows: dict[str, dict[str, Any]] = {}
    soft: list[str] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, real in tqdm(origin.items(), unit=" weights", disable=not progress, file=sys.stderr):
            entry: dict[str, Any] = {"shape": list(checkpoint.shapes[real])}
            if real in source.prunable:
                weight = source.prunable[real]
                value, finished = sparse_weight(checkpoint, weight, pattern)
                value = value.to(dtype) + 0.0  # small negative values may have become -0.0
                counted = check_weight(value, name, pattern, weight.input_axis)
                entry |= {"input_axis": weight.input_axis, "groups": counted.groups, "nonzeros": counted.nonzeros}
                soft.extend([] if finished else [name])
            else:
                value = checkpoint.weight(real).to(specs[name].dtype)
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise ValueError(f"{checkpoint.folder}: {name} is not finite in {value.dtype}; try --dtype float32")
            rows[name] = entry
            yield name, value

    hashes = write_tensors(folder, "model", specs, tensors(), shard_bytes)
    for name, entry in rows.items():
        entry["sha256"] = hashes[name]
    adapter = _write_adapter(source, folder / "adapter", dtype)
    _copy_model_files(source, folder, dtype)
    masked = {name for name in rows if name in source.prunable}
    sparsity = {
        "format": 1,
        "pattern": str(pattern),
        "finished": not soft,
        "step": checkpoint.client_state["sparseforge"].get("step", checkpoint.step),
        "source": {
            "checkpoint": checkpoint.folder.name,
            "zero_stage": checkpoint.stage,
            "ranks": checkpoint.world_size,
        },
        "dtype": str(dtype).removeprefix("torch."),
        "coverage": source.coverage,
        "adapter": adapter,
        "config": source.config.to_dict(),
        "weights": {name: rows[name] for name in rows if name in masked},
        "dense": {name: rows[name] for name in rows if name not in masked},
    }
    (folder / "sparsity.json").write_text(json.dumps(sparsity, indent=2) + "\n")
    return sparsity


def _write_adapter(source: Source, folder: Path, dtype: torch.dtype) -> str | None:
    shapes = source.checkpoint.shapes
    branches = {name.rpartition(".")[0]: shape for name, shape in shapes.items() if name.rpartition(".")[2] == LOW_RANK}
    if not branches:
        return None
    weights = {name: source.prunable[f"{name}.weight"] for name in branches}
    inputs = {name: weight.shape[weight.input_axis] for name, weight in weights.items()}
    transposed = next(iter(weights.values())).input_axis == -2

    def read(name: str) -> Tensor:
        return source.checkpoint.weight(f"{name}.{LOW_RANK}")

    write_adapter(folder, {name: (s[0], s[1]) for name, s in branches.items()}, inputs, read, transposed, dtype)
    return folder.name


def _copy_model_files(source: Source, folder: Path, dtype: torch.dtype) -> None:
    """Config (with the exported dtype), tokenizer and whatever else lies beside the weights."""
    for file in sorted(source.model_folder.iterdir()):
        weights = ".safetensors" in file.name or ".bin" in file.name
        wanted = file.suffix in _COPIED or file.name.startswith("LICENSE")
        if file.is_file() and wanted and not weights and file.name not in ("config.json", "sparsity.json"):
            shutil.copyfile(file, folder / file.name)
    config = dict(source.model_config)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _stored(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.dtype:
    """Parameters are stored in the exported dtype, buffers in their own."""
    return checkpoint.trained_dtype(name) if name in checkpoint.buffers else dtype


def _dtype(source: Source, dtype: str) -> torch.dtype:
    if dtype == "auto":
        where = f"{source.model_folder / 'config.json'}: dtype"
        dtype = str(source.model_config.get("dtype", source.model_config.get("torch_dtype", "float32")))
    else:
        where = "--dtype"
    if dtype not in DTYPES:
        raise ValueError(f"{where} {dtype!r}: use one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]
