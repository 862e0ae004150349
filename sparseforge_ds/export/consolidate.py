"""From a run to a 2:4 Hugging Face model: files in, files out, one weight at a time in each worker.

    sparseforge consolidate RUN OUT

OUT is an ordinary folder (safetensors, config, tokenizer) that `AutoModelForCausalLM.from_pretrained` loads without
this package, plus `sparsity.json` (pattern, groups, non-zeros and sha256 of every weight, source step, resolved
config) and, for a run with a low-rank branch, a PEFT LoRA adapter beside the weights, which `from_pretrained` loads
with them where peft is installed, and a README.md that says so.

What is checked, and when: the checksums of all files of the source before anything is read from them; masks, masters
and finiteness as a weight is read; its groups and its hash on the very bytes that are written; then all bytes are read
back, which must have these hashes, and the folder is verified as `sparseforge verify` does it. Only then it gets its
name: OUT is never half a model. An error leaves nothing behind. A kill leaves `.OUT.partial`, from which the same
command goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sparseforge_ds.checkpoint.disk import sync
from sparseforge_ds.checkpoint.tensors import (
    FileLayout,
    hash_file,
    lay_out,
    parse_size,
    tensor_bytes,
    write_at,
    write_index,
)
from sparseforge_ds.export.adapter import adapter_record, write_branches
from sparseforge_ds.export.card import write_card
from sparseforge_ds.export.model_files import copy_model_files
from sparseforge_ds.export.partial import Partial
from sparseforge_ds.export.source import Source, config_sha256
from sparseforge_ds.export.verify import check_folder
from sparseforge_ds.export.weight_report import WeightReport, check_weight
from sparseforge_ds.export.workers import each

_COUNTS = ("groups", "nonzeros", "violations", "negative_zeros", "nonfinite")


def consolidate(
    source: Source,
    out: str | Path,
    max_shard_size: str = "5GB",
    workers: int = 1,
    progress: bool = False,
    note: Callable[[str], None] = lambda text: None,
    prove: Callable[[Path], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write the Hugging Face folder.

    Args:
        out: a folder that does not exist yet, or is empty.
        max_shard_size: largest safetensors file, like 5GB.
        workers: threads. Memory grows with them, the bytes that are written are always the same.
        progress: show a bar on stderr.
        note: is told what the user should know.
        prove: is called with the finished folder before it gets its name; what it returns becomes the `proof` of
            `sparsity.json`, which is null without, and what it raises ends the export.

    Returns:
        What `sparsity.json` holds.

    Raises:
        ValueError: `out` is in use or cannot be written, the source is damaged, or a weight is not finite in `dtype`;
            nothing is left behind.
    """
    out = Path(out)
    files = lay_out("model", source.specs, parse_size(max_shard_size))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder; give another name")
    headers = {file.name: hashlib.sha256(file.header).hexdigest() for file in files}
    try:
        partial = Partial(out, {"source": source.identity, "headers": headers})
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error}); nothing was left behind") from None
    try:
        if partial.discarded:
            note(f"{partial.folder}: was begun from another source or with other settings; starting afresh")
        source.check_bytes(workers)
        counted = _write_weights(source, partial, files, workers, progress)
        sparsity = _write_rest(source, partial, files)
        report = check_folder(partial.model, workers=workers, counted=counted)
        if not report.ok:
            worst = next(iter([*report.notes, *report.missing, *report.changed]), "")
            raise ValueError(f"{out}: the written folder does not verify ({report.violations} violations, {worst})")
        if prove is not None:
            sparsity["proof"] = prove(partial.model)
            _write_json(partial.model / "sparsity.json", sparsity)
        partial.publish()
    except OSError as error:
        partial.remove()
        raise ValueError(f"{out}: cannot be written ({error}); nothing was left behind") from None
    except ValueError:
        partial.remove()
        raise
    finally:
        partial.close()
    return sparsity


def _write_weights(
    source: Source, partial: Partial, files: list[FileLayout], workers: int, progress: bool
) -> dict[str, WeightReport]:
    """All safetensors files. What the journal lists, and is there with its hash, stays.

    Returns:
        What was counted in every weight of the pattern.
    """
    for file in files:
        _prepare(partial.model / file.name, file)
    place = {name: (partial.model / file.name, at) for file in files for name, at in file.offsets.items()}
    total = sum(spec.nbytes for spec in source.specs.values())
    bar = tqdm(total=total, unit="B", unit_scale=True, disable=not progress, file=sys.stderr)

    def write(name: str) -> None:
        spec = source.specs[name]
        path, at = place[name]
        if name not in partial.done or partial.done[name]["sha256"] != hash_file(path, at, at + spec.nbytes):
            value = source.read(name)
            assert tuple(value.shape) == spec.shape and value.dtype == spec.dtype
            entry: dict[str, Any] = {"shape": list(spec.shape)}
            if name in source.prunable:
                axis = source.prunable[name].input_axis
                counted = check_weight(value, name, source.pattern, axis)
                entry |= {"input_axis": axis, **{key: getattr(counted, key) for key in _COUNTS}}
            data = tensor_bytes(value)
            write_at(path, at, data)
            partial.add(name, {**entry, "sha256": hashlib.sha256(data).hexdigest()})
        bar.update(spec.nbytes)

    # The largest first, so that the workers end together; equal ones stay in the order of the files.
    with bar:
        each(write, sorted(source.specs, key=lambda name: -source.specs[name].nbytes), workers)
    each(lambda file: sync(partial.model / file.name), files, workers)
    return {
        name: WeightReport(name, source.specs[name].shape, **{key: partial.done[name][key] for key in _COUNTS})
        for name in source.prunable
    }


def _write_rest(source: Source, partial: Partial, files: list[FileLayout]) -> dict[str, Any]:
    """Index, adapter, config, tokenizer and sparsity.json, anew even where an interrupted run wrote them."""
    folder = partial.model
    write_index(folder, "model", source.specs, files)
    if source.branches:
        write_branches(source, folder)
        write_card(source, folder, packed=False)
    copy_model_files(source, folder)
    rows: dict[str, dict[str, dict[str, Any]]] = {"weights": {}, "dense": {}}
    for name in source.specs:
        entry = partial.done[name]
        keys = ("shape", "input_axis", "groups", "nonzeros", "sha256")
        section = "weights" if name in source.prunable else "dense"
        rows[section][name] = {key: entry[key] for key in keys if key in entry}
        if name in source.known_as:
            rows[section][name]["known_as"] = source.known_as[name]
        rows[section][name]["dtype"] = str(source.specs[name].dtype).removeprefix("torch.")
    sparsity = {**source.record, **adapter_record(source, folder)}
    sparsity["config_sha256"] = config_sha256(source.model_config)
    sparsity |= {**rows, "proof": None}
    _write_json(folder / "sparsity.json", sparsity)
    return sparsity


def _prepare(path: Path, layout: FileLayout) -> None:
    """A file of its final size, with its header; one that is there already keeps its tensors."""
    if not path.is_file():
        with open(path, "wb") as file:
            file.write(layout.header)
    else:
        write_at(path, 0, memoryview(layout.header))
    os.truncate(path, layout.size)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
