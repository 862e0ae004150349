"""The tools under test, each as a function of a damaged folder: what it makes of it, in a form that can be compared.

A target returns `Result`, or raises what the tool raised. `model` is the digest of what must never be wrong: weights,
masks, the exported tensors and config. `accepted` is False where the tool itself said that something is not in order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.checkpoint.zero_partitions import KEPT
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.inspection import inspect
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.resume import find_resumption
from sparseforge_ds.train.run_folder import check_run_folder as check_run_folder
from sparseforge_ds.train.spec import RunSpec, make_spec
from tests.fuzz.inputs import EXPORTS, RUNS

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """Result of a tool on a folder."""

    model: str
    facts: str = ""
    """Digest of what else it says, and of what only training needs."""
    accepted: bool = True


Target = Callable[[Path, Path, Path], Result]
"""(folder to read, folder to write that does not exist, good folders) -> Result."""


def _digest(parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            total.update(f"{part.dtype}{tuple(part.shape)}".encode())
            total.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(json.dumps(part, sort_keys=True, default=str).encode())
    return total.hexdigest()


def result_of(checkpoint: Checkpoint) -> Result:
    """Digest a checkpoint: weights, masks and dense weights are the model; other states and the step are facts."""
    # A damaged list of weights is strange, and nothing more is asked of it.
    entries = checkpoint.client_state.get("sparseforge", {}).get("weights", [])
    strange = not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries)
    listed = set() if strange else {entry["name"] for entry in entries}
    moving = _masks_move(checkpoint.client_state.get("sparseforge", {}))

    def tensors(model: bool) -> Any:
        nonlocal strange
        for name in checkpoint.shapes:
            keys = [key for key in checkpoint.states(name) if (key in ("mask", "dense", KEPT)) == model]
            # Tensors of the model, or all others.
            values = [checkpoint.state(name, key) for key in keys] + [checkpoint.weight(name)] * model
            if model:
                strange |= not all(bool(torch.isfinite(value.float()).all()) for value in values)
                # A weight under a mask has exactly these states, and finite numbers.
                masks = {"dense": torch.float32, "mask": torch.uint16} if moving else {KEPT: torch.bool}
                expected = masks if name in listed else {}
                strange |= expected != {key: checkpoint.state(name, key).dtype for key in keys}
            yield [name, keys]
            yield from values

    def facts() -> Any:
        yield [sorted(checkpoint.aliases.items()), sorted(checkpoint.buffers), checkpoint.step]
        yield checkpoint.client_state.get("sparseforge", {})
        yield from tensors(model=False)

    model = _digest(tensors(model=True))
    return Result(model, _digest(facts()), accepted=not strange)


def _masks_move(state: dict[str, Any]) -> bool:
    """Return whether a checkpoint holds masks that move; its configuration has the step at which they freeze."""
    try:
        return bool(state["step"] < SparseForgeConfig.from_dict(state["config"]).release_step)
    except (KeyError, TypeError, ValueError, AttributeError):
        return True


def digest_folder(folder: Path, adapter: bool = True) -> str:
    """Tensors and configuration of an exported folder, and of the adapter in it."""

    def parts() -> Any:
        for part, stem, config in (
            (folder, "model", "config.json"),
            (folder, "adapter_model", "adapter_config.json"),
        ):
            stored = any(part.glob(f"{stem}*.safetensors"))
            if not stored or (stem == "adapter_model" and not adapter):
                continue
            yield {} if config is None else json.loads((part / config).read_text())
            tensors = TensorFolder(part, stem)
            for name in tensors.specs:
                yield name
                yield tensors.read(name)

    return _digest(parts())


def reader(folder: Path, out: Path, inputs: Path) -> Result:
    """Read every weight and state of a checkpoint, after its checksums."""
    checkpoint = Checkpoint(folder)
    for file in checkpoint.files:
        file.check_bytes()
    return result_of(checkpoint)


def exported(format: str) -> Target:
    """Export a run, or a folder that was exported before, without the proof, which costs seconds."""

    def write(folder: Path, out: Path, inputs: Path) -> Result:
        export(open_source(folder), out, format, skip_proof=True)
        return Result(digest_folder(out))

    return write


def inspected(folder: Path, out: Path, inputs: Path) -> Result:
    """Run `sparseforge inspect --check`."""
    report = inspect(folder, checksums=True)
    content = report.to_dict()
    json.dumps(content)
    status = content["status"] or {}
    return Result("", _digest([status]), report.ok)


def verified(folder: Path, out: Path, inputs: Path) -> Result:
    """Run `sparseforge verify`, and digest the model that it speaks of; of an adapter the tensors alone."""
    report = check_folder(folder)
    if not report.ok:
        return Result("", accepted=False)
    return Result(digest_folder(folder, adapter=False))


class OneRank:
    """The only process of a run, as far as looking for a checkpoint goes."""

    rank = 0
    world_size = 1
    first = True

    def all_or_raise(self, work: Callable[[], T]) -> T:
        return work()

    on_first = all_or_raise

    def gather(self, value: T) -> list[T]:
        return [value]


_SPECS: dict[str, RunSpec] = {}


def resumed(folder: Path, out: Path, inputs: Path) -> Result:
    """Run the trainer's checks before it loads anything, and return what it would load."""
    name = folder.name
    if name not in _SPECS:
        flags = json.loads((inputs / "flags" / f"{name}.json").read_text())
        _SPECS[name] = make_spec(RunArguments(**flags), 2)
    spec = _SPECS[name]
    spec = dataclasses.replace(spec, arguments=dataclasses.replace(spec.arguments, output_dir=str(folder), resume=True))
    ranks: Any = OneRank()
    check_run_folder(spec)
    checkpoints = Checkpoints(folder / "checkpoints", ranks, spec.stage, spec.arguments.keep_checkpoints)
    return result_of(find_resumption(spec, ranks, checkpoints).checkpoint)


_READ = {"reader": reader, "inspect": inspected}
_EXPORT = {"consolidate": exported("hf")}
TARGETS: dict[str, dict[str, Target]] = {
    **{name: {**_READ, **_EXPORT, "resume": resumed} for name in RUNS},
    **{name: {"verify": verified, **_EXPORT} for name in EXPORTS},
}
"""Tools that read such a folder, by subject."""
for _subject in ("stage1_bf16", "hf_whole"):
    TARGETS[_subject]["export packed24"] = exported("packed24")
