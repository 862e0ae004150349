"""What a source can be exported as: written under a temporary name, proved, and renamed.

| format | OUT is | proof |
|---|---|---|
| `hf` | an ordinary Hugging Face folder | plain transformers loads it, logits bit-equal |
| `packed24` | the same, 2:4 weights in 0.5625 of their bf16 bytes | transformers with our package, logits bit-equal |
| `mask` | the mask alone | it unpacks to the source's; applied to the dense model, bit-equal |
| `adapter` | the low-rank branch as a PEFT LoRA adapter | peft loads it, logits are ours |
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.disk import sync, sync_tree
from sparseforge_ds.checkpoint.tensors import parse_size
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.export.adapter import write_branches
from sparseforge_ds.export.consolidate import consolidate
from sparseforge_ds.export.mask_only import prove_masks, write_masks
from sparseforge_ds.export.packed24 import require_24, write_packed
from sparseforge_ds.export.proof import prove_adapter, prove_folder, require
from sparseforge_ds.export.source import Source

FORMATS = ("hf", "packed24", "mask", "adapter")


def export(
    source: Source,
    out: str | Path,
    format: str = "hf",
    max_shard_size: str = "5GB",
    workers: int = 1,
    progress: bool = False,
    note: Callable[[str], None] = lambda text: None,
    base: str | Path | None = None,
    skip_proof: bool = False,
) -> dict[str, Any]:
    """Write `out`, and prove it before it gets its name.

    Args:
        out: a folder that does not exist yet, or is empty.
        format: one of `FORMATS`.
        max_shard_size: largest safetensors file of `hf` and `packed24`.
        workers: threads that read and write `hf`.
        note: is told what the user should know.
        base: for `mask`, the dense model: the proof applies the mask to it.
        skip_proof: for a machine that cannot hold the model; `proof` is then null in what is written.

    Returns:
        What `sparsity.json` (of a mask, `mask.json`) holds, with `proof`.

    Raises:
        ValueError: the source has no such export, `out` is in use or cannot be written, the machine cannot do the
            proof, or the proof fails; nothing is left behind.
    """
    if format not in FORMATS:
        raise ValueError(f"--format {format!r}: use one of {', '.join(FORMATS)}")
    if base is not None and format != "mask":
        raise ValueError(f"--base is the dense model that a mask is proved on; --format {format} needs none")
    if format == "adapter" and not source.branches:
        raise ValueError(f"{source.opened[0]}: has no low-rank branch, so there is no adapter; use --format hf")
    if format == "mask":
        _require_mask_alone(source)
    if format == "packed24":
        require_24(source)
    if format != "mask" and not skip_proof:
        require(source)
    if format == "hf":
        prove = None if skip_proof else partial(prove_folder, source, plain=True)
        return consolidate(source, out, max_shard_size, workers, progress, note, prove)
    shard_bytes = parse_size(max_shard_size)
    source.check_bytes(workers)
    with unfinished_folder(out) as folder:
        if format == "packed24":
            record = write_packed(source, folder, shard_bytes, progress)
            record["proof"] = None if skip_proof else prove_folder(source, folder, plain=False)
            _write_json(folder / "sparsity.json", record)
        elif format == "mask":
            record = write_masks(source, folder, progress)
            _write_json(folder / "mask.json", record)
            record["proof"] = None if skip_proof else prove_masks(source, folder, base, progress)
            _write_json(folder / "mask.json", record)
        else:
            write_branches(source, folder)
            record = {**source.record, "proof": None if skip_proof else prove_adapter(source, folder)}
    return record


def _require_mask_alone(source: Source) -> None:
    """Refuse the mask of weights that were shifted into branches before it was chosen: on W it fits nothing."""
    config = source.record.get("config")
    if isinstance(config, dict) and SparseForgeConfig.from_dict(config).shifts:
        raise ValueError(
            f"{source.opened[0]}: its mask was made for weights that had given up a shift to their low-rank branches "
            "(low_rank.shift), and no mask of the dense model's own weights; use --format hf, or train with "
            '"shift": false'
        )


@contextmanager
def unfinished_folder(out: str | Path) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` at the end of the block, or is gone after an error.

    Raises:
        ValueError: `out` is in use, or cannot be written.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder; give another name")
    unfinished = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        yield unfinished
        sync_tree(unfinished)
        unfinished.replace(out)
        sync(out.absolute().parent)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error}); nothing was left behind") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
