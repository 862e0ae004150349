"""From a run to a 2:4 Hugging Face model, offline, one weight at a time.

    sparseforge consolidate RUN OUT

OUT is an ordinary folder (safetensors, config, tokenizer) that `AutoModelForCausalLM.from_pretrained` loads without
this package, plus `sparsity.json` (pattern, groups, non-zeros and sha256 of every weight, source step, resolved
config) and, for a run with a low-rank branch, `adapter/`, a PEFT LoRA adapter that belongs on top. The folder is
written under a temporary name, verified, and renamed at the end: OUT is never half a model.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.tensors import parse_size, write_tensors
from sparseforge_ds.export.adapter import write_adapter
from sparseforge_ds.export.source import Source
from sparseforge_ds.export.verify import check_folder, check_weight

_COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken")


def consolidate(
    source: Source, out: str | Path, max_shard_size: str = "5GB", workers: int = 1, progress: bool = False
) -> dict[str, Any]:
    """Write the Hugging Face folder.

    Args:
        out: a folder that does not exist yet, or is empty.
        max_shard_size: largest safetensors file, like 5GB.

    Returns:
        What `sparsity.json` holds.

    Raises:
        ValueError: `out` is in use or cannot be written, or a weight is not finite in `dtype`; nothing is left behind.
    """
    out = Path(out)
    shard_bytes = parse_size(max_shard_size)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder; give another name")
    source.check_bytes(workers)
    unfinished = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        sparsity = _write(source, unfinished, shard_bytes, progress)
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


def _write(source: Source, folder: Path, shard_bytes: int, progress: bool) -> dict[str, Any]:
    """Everything into `folder`, which exists and is empty."""
    rows: dict[str, dict[str, Any]] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, spec in tqdm(source.specs.items(), unit=" weights", disable=not progress, file=sys.stderr):
            value = source.read(name)
            rows[name] = {"shape": list(spec.shape)}
            if name in source.prunable:
                axis = source.prunable[name].input_axis
                counted = check_weight(value, name, source.pattern, axis)
                rows[name] |= {"input_axis": axis, "groups": counted.groups, "nonzeros": counted.nonzeros}
            yield name, value

    hashes = write_tensors(folder, "model", source.specs, tensors(), shard_bytes)
    for name, entry in rows.items():
        entry["sha256"] = hashes[name]
    adapter = _write_adapter(source, folder / "adapter")
    _copy_model_files(source, folder)
    sparsity = {
        **source.record,
        "adapter": adapter,
        "weights": {name: rows[name] for name in rows if name in source.prunable},
        "dense": {name: rows[name] for name in rows if name not in source.prunable},
    }
    (folder / "sparsity.json").write_text(json.dumps(sparsity, indent=2) + "\n")
    return sparsity


def _write_adapter(source: Source, folder: Path) -> str | None:
    if not source.branches:
        return None
    weights = {name: source.prunable[f"{name}.weight"] for name in source.branches}
    inputs = {name: weight.shape[weight.input_axis] for name, weight in weights.items()}
    transposed = next(iter(weights.values())).input_axis == -2
    write_adapter(folder, source.branches, inputs, source.read_branch, transposed, source.dtype)
    return folder.name


def _copy_model_files(source: Source, folder: Path) -> None:
    """Config (with the exported dtype), tokenizer and whatever else lies beside the weights."""
    for file in sorted(source.model_folder.iterdir()):
        weights = ".safetensors" in file.name or ".bin" in file.name
        wanted = file.suffix in _COPIED or file.name.startswith("LICENSE")
        if file.is_file() and wanted and not weights and file.name not in ("config.json", "sparsity.json"):
            shutil.copyfile(file, folder / file.name)
    config = dict(source.model_config)
    config.pop("torch_dtype", None)
    config["dtype"] = str(source.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
