"""Writes a run folder whose checkpoint fits any number of ranks, ZeRO stage and offload; offline, tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sparseforge_ds.checkpoint.contents import Contents, Group
from sparseforge_ds.checkpoint.disk import sync, sync_tree
from sparseforge_ds.checkpoint.folder import PORTABLE, find_run
from sparseforge_ds.checkpoint.manifest import NAME as MANIFEST
from sparseforge_ds.checkpoint.manifest import Manifest, fingerprint
from sparseforge_ds.checkpoint.portable import WEIGHT, tensor_specs, to_json, unportable
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.checkpoint.tensors import parse_size, write_tensors

_RUN_FILES = ("sparseforge.json", "ds_config.json", "model")
_RANDOM = re.compile(r"random_\d{5,}\.json")

Progress = Callable[[int, int], None]
"""Called with the bytes written so far, and in all."""


def reshard(path: str | Path, out: str | Path, max_shard_size: str = "5GB", progress: Progress | None = None) -> Path:
    """Copy the newest checkpoint of a run, and what belongs to the run, into a folder that any layout continues from.

    Args:
        path: a run's folder, or one checkpoint.
        out: the new run folder; must not exist, or be empty.
        max_shard_size: largest safetensors file, like 5GB.

    Returns:
        The checkpoint in `out`.

    Raises:
        ValueError: the checkpoint is damaged or holds what has no portable form, or `out` is in use, too small a disk
            or cannot be written; nothing is left behind.
    """
    out, shard_bytes = Path(out), parse_size(max_shard_size)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder; give another name")
    checkpoint = Checkpoint(path)
    contents = portable_contents(checkpoint)
    needed = sum(spec.nbytes for specs in tensor_specs(contents).values() for spec in specs.values())
    unfinished = out.absolute().parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(unfinished.parent).free) < needed:
            raise ValueError(f"{out}: needs {needed / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB left; make room")
        checkpoint.check_bytes()
        unfinished.mkdir()
        run = find_run(path)
        for name in _RUN_FILES if run else ():
            assert run is not None
            if (run / name).is_dir():
                shutil.copytree(run / name, unfinished / name, copy_function=_copy)
            elif (run / name).exists():
                _copy(run / name, unfinished / name)
        steps = contents.client_state.get("sparseforge", {}).get("step", contents.step)
        tag = f"step_{steps:06d}"
        folder = unfinished / "checkpoints" / tag
        folder.mkdir(parents=True)
        _write(checkpoint, contents, folder, shard_bytes, _Count(needed, progress))
        _describe(folder, steps, contents.world_size)
        (folder.parent / "latest").write_text(tag)
        sync_tree(unfinished)
        if out.exists():
            out.rmdir()  # empty
        unfinished.replace(out)
        sync(out.absolute().parent)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error}); nothing was left behind") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return out / "checkpoints" / tag


def portable_contents(checkpoint: Checkpoint) -> Contents:
    """What `portable.json` is going to say, in plain JSON types.

    Raises:
        ValueError: something has no portable form, or the names of some optimizer states are not known.
    """
    contents, where = checkpoint.contents, checkpoint.folder
    for name, entry in contents.entries.items():
        if (why := unportable(entry)) is not None:
            raise ValueError(f"{where}: {name} has no portable form: {why}")
    state = contents.client_state.get("sparseforge", {})
    if type(step := state.get("step", 0)) is not int or step < 0:
        raise ValueError(f"{where}: its client state has step {step!r:.80}")
    if checkpoint.stage == 0 and "groups" not in state:
        raise ValueError(
            f"{where}: was saved at stage 0 by a version that did not keep the names of all optimizer states; "
            "continue it once with engine.load_checkpoint and save again"
        )
    train = contents.client_state.get("train", {})
    client_state = contents.client_state | {"train": {key: train[key] for key in train if key != "rng"}}
    plain = _plain(
        {"client_state": client_state, "lr_scheduler": contents.lr_scheduler, "scale": contents.loss_scale}, str(where)
    )
    return replace(
        contents,
        groups=[Group(group.names, _plain(group.settings, f"{where}: param group")) for group in contents.groups],
        client_state=plain["client_state"],
        lr_scheduler=plain["lr_scheduler"],
    )


class _Count:
    """How much is written."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, tensor: Tensor) -> None:
        self.done += tensor.numel() * tensor.element_size()
        if self.progress is not None:
            self.progress(self.done, self.total)


def _write(checkpoint: Checkpoint, contents: Contents, folder: Path, shard_bytes: int, count: _Count) -> None:
    """Tensors and `portable.json` into `folder`, and the generators of the ranks."""
    hashes = {}
    for stem, specs in tensor_specs(contents).items():
        tensors = _read_all(checkpoint, stem, list(specs), count)
        hashes[stem] = write_tensors(folder, stem, specs, tensors, shard_bytes)
    text = json.dumps(to_json(contents, hashes), indent=1, allow_nan=False)
    (folder / PORTABLE).write_text(text + "\n")
    for file in sorted(checkpoint.folder.iterdir()):
        if _RANDOM.fullmatch(file.name):
            if (checkpoint.folder / MANIFEST).exists():
                Manifest.read(checkpoint.folder).check_file(file.name)
            _copy(file, folder / file.name)


def _read_all(checkpoint: Checkpoint, stem: str, names: list[str], count: _Count) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        tensor = checkpoint.weight(name) if stem == WEIGHT else checkpoint.state(name, stem)
        yield name, tensor
        count.add(tensor)


def _copy(file: str | Path, to: str | Path) -> None:
    if not Path(file).is_file():  # a pipe or a device might never end
        raise ValueError(f"{file}: is not a file; replace or remove it")
    shutil.copyfile(file, to)


def _describe(folder: Path, step: int, world_size: int) -> None:
    """`checkpoint.json`, as the trainer writes it."""
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    fingerprints = {name: fingerprint(folder / name) for name in files}
    manifest = Manifest(folder, step, world_size, None, None, files, fingerprints)
    (folder / MANIFEST).write_text(json.dumps(manifest.record(), indent=2) + "\n")


def _plain(value: Any, where: str) -> Any:
    """A copy in JSON types."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if number is None or isinstance(number, (bool, int, str)) or (isinstance(number, float) and math.isfinite(number)):
        return number
    raise ValueError(f"{where}: a {type(value).__name__} has no portable form ({value!r:.80})")
