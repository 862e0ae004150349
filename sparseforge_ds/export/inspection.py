"""Status of a run, read from its folder: step and phase, layout, coverage, state of its masks, damage on disk.

It is read from a run folder, its `checkpoints`, one checkpoint, or a checkpoint that DeepSpeed saved for somebody else.
Nothing in them is executed, and weights are read one at a time.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.damage import verify_checkpoint
from sparseforge_ds.checkpoint.folder import (
    find_checkpoint,
    find_run,
    newest_trainer_checkpoint,
    read_json_object,
    require_saved,
)
from sparseforge_ds.checkpoint.inventory import (
    Inventory,
    SavedCheckpoint,
    describe_all,
    describe_checkpoint,
    is_checkpoint,
    take_inventory,
)
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.run_state import RunState, SparseWeight
from sparseforge_ds.export.counting import chunk_ranges
from sparseforge_ds.export.run_source import read_masked
from sparseforge_ds.mask.anneal import Schedule
from sparseforge_ds.mask.kernels.groups import survivors
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import BRANCH

UNDECIDED = (0.05, 0.95)
"""A mask value between these is neither kept nor pruned yet."""


@dataclass(frozen=True)
class MaskReport:
    """State of one mask, in shares of its values."""

    name: str
    elements: int
    binary: float
    """Share of values that are 0 or 1."""
    undecided: float
    """Share of values inside of `UNDECIDED`."""
    density: float
    """Share of values above 0 that are in the top N of their group."""
    magnitude_agreement: float | None
    """Share of the top N of every group that are also the N largest |dense|. None once the mask is frozen, since the
    pruned weights are gone then."""
    strange: int
    """Number of values outside [0, 1]."""


@dataclass(frozen=True)
class RunStatus:
    """Content of a checkpoint, in numbers; those of the forge are None or 0 in a foreign checkpoint."""

    step: int
    """Applied optimizer steps, as the forge counts them; DeepSpeed's own count in a foreign checkpoint."""
    world_size: int
    zero_stage: int
    precision: str
    parameters: int
    tokens: int | None = None
    pattern: str | None = None
    max_steps: int | None = None
    phase: str | None = None
    hardening: tuple[int, int] | None = None
    """Optimizer steps between which the mask becomes binary."""
    masked_weights: int = 0
    masked_parameters: int = 0
    branch_parameters: int = 0
    masks: list[MaskReport] = field(default_factory=list)
    """Reports of all masks, the most undecided first."""


@dataclass(frozen=True)
class Inspection:
    """Status of a run or a checkpoint, and the state of its files."""

    path: Path
    run: dict[str, Any] | None
    """Content of `sparseforge.json`: coverage, flags, versions."""
    result: dict[str, Any] | None
    """Content of `result.json`."""
    leftovers: list[str]
    """Files that interrupted saves left behind."""
    checkpoints: list[SavedCheckpoint]
    """All checkpoints of the run, or the single one that was asked for."""
    checkpoint: SavedCheckpoint | None
    """The checkpoint that `status` describes."""
    status: RunStatus | None
    problems: list[str]
    """Reasons why the checkpoint cannot be resumed or exported, and anything else that is not in order."""

    @property
    def ok(self) -> bool:
        """True if there is a checkpoint without problems; with `checksums`, if all of them are intact."""
        return self.status is not None and not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types, with a summary of the masks."""
        masks = self.status.masks if self.status else []
        mask = asdict(summarize_masks(masks)) if masks else None
        return {"ok": self.ok, **asdict(self), "path": str(self.path), "mask": mask}


def inspect(path: str | Path, quick: bool = False, checksums: bool = False) -> Inspection:
    """Inspect a run or a checkpoint without a process group.

    Args:
        path: a run's folder, its `checkpoints`, one checkpoint, or the output folder of transformers' Trainer.
        quick: True to read no masks.
        checksums: True to read every byte of all checkpoints.
    """
    path = Path(path)
    checkpoints, single = _locate(path)
    run = path if checkpoints is not None and checkpoints.parent == path else find_run(path)
    description = _optional_json(run, "sparseforge.json")
    result = _optional_json(run, "result.json") if checkpoints is not None else None
    problems: list[str] = []
    # The checkpoints of the run, or the one that was named.
    if checkpoints is not None:
        parent = checkpoints
        inventory = take_inventory(checkpoints)
        problems += [inventory.problem] if inventory.problem else []
        problems += [] if inventory.current else [f"{checkpoints}: no checkpoint yet"]
        single = checkpoints / inventory.current.name if inventory.current else None
    else:
        assert single is not None
        parent = single.parent
        named_entry = describe_checkpoint(single)
        inventory = Inventory([named_entry], [], named_entry, None)
    entries = inventory.entries
    current = inventory.current
    # Every byte of them, if that is asked for.
    if checksums:
        entries = describe_all((parent / entry.name for entry in entries), verify_checkpoint)
        if checkpoints is not None and single is not None and not single.is_dir():
            # The run has saved, and removed the checkpoint that was the newest.
            current = take_inventory(checkpoints).current
            single = checkpoints / current.name if current else None
            entries += describe_all([single] if single else [], verify_checkpoint)
        current = next((entry for entry in entries if current is not None and entry.name == current.name), current)
    checked = entries if checksums else []
    problems += [entry.problem for entry in (*checked, current) if entry is not None and entry.problem is not None]
    problems = list(dict.fromkeys(problems))
    # The content of the current one.
    status = None
    if single is not None and not (current is not None and current.damaged):
        try:
            status = _read(single, quick)
        except ValueError as error:
            if str(error) not in problems:
                problems.append(str(error))
    if status is not None:
        problems += [
            f"{single}: the mask of {mask.name} has {mask.strange} values that are not in [0, 1]; use another one"
            for mask in status.masks
            if mask.strange
        ]
    return Inspection(path, description, result, inventory.leftovers, entries, current, status, problems)


def phase(config: SparseForgeConfig, step: int, steps: int) -> str:
    """Return the phase of a run of `steps` steps: heating, hardening, frozen finetune or finished."""
    if step >= steps:
        return "finished"
    name = config.resolved_schedule.phase(step)
    return "frozen finetune" if name == "frozen" else name


def mask_report(name: str, mask_GM: Tensor, dense_GM: Tensor, pattern: Pattern) -> MaskReport:
    """Describe a mask by groups, (G, M) in fp32, beside the dense weight of the same groups."""
    hard_GM = survivors(mask_GM, pattern)
    largest_GM = survivors(dense_GM.square(), pattern)
    low, high = UNDECIDED
    count = max(1, mask_GM.numel())
    return MaskReport(
        name=name,
        elements=mask_GM.numel(),
        binary=int(((mask_GM == 0) | (mask_GM == 1)).sum()) / count,
        undecided=int(((mask_GM > low) & (mask_GM < high)).sum()) / count,
        density=int((hard_GM & (mask_GM > 0)).sum()) / count,
        magnitude_agreement=int((hard_GM & largest_GM).sum()) / max(1, int(hard_GM.sum())),
        strange=int((~((mask_GM >= 0) & (mask_GM <= 1))).sum()),
    )


def summarize_masks(masks: list[MaskReport]) -> MaskReport:
    """Return one report of all masks of a run, in which each counts by its elements."""
    elements = sum(mask.elements for mask in masks)

    def mean(key: str) -> float:
        return math.fsum(getattr(mask, key) * mask.elements for mask in masks) / max(1, elements)

    frozen = any(mask.magnitude_agreement is None for mask in masks)
    return MaskReport(
        name="all",
        elements=elements,
        binary=mean("binary"),
        undecided=mean("undecided"),
        density=mean("density"),
        magnitude_agreement=None if frozen else mean("magnitude_agreement"),
        strange=sum(mask.strange for mask in masks),
    )


def _locate(path: Path) -> tuple[Path | None, Path | None]:
    """Return the folder of checkpoints and None, or None and the checkpoint, that a path stands for."""
    if path.is_file():
        return None, find_checkpoint(path)  # a file like checkpoints/best names one
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give a run's output folder or one checkpoint in it")
    # What a folder is, from what it holds: a run, one checkpoint, or the folder of another trainer.
    if (path / "sparseforge.json").is_file() or (path / "checkpoints").is_dir():
        return path / "checkpoints", None
    if is_checkpoint(path):
        return None, path
    if (path / "latest").is_file():  # also a folder of transformers' Trainer, which has the model beside it
        return path, None
    if (of_trainer := newest_trainer_checkpoint(path)) is not None:
        return of_trainer, None
    # An exported model, a folder of checkpoints, or nothing that we know.
    if any(path.glob("*.safetensors")) or (path / "config.json").is_file():
        raise ValueError(
            f"{path}: is an exported model, not a run; look into it with: sparseforge verify {shlex.quote(str(path))}"
        )
    if any(is_checkpoint(child) for child in path.iterdir() if child.is_dir()):
        return path, None
    require_saved(path)
    raise ValueError(
        f"{path}: holds neither a run nor a checkpoint; give a run's output folder or one checkpoint in it"
    )


def _optional_json(run: Path | None, name: str) -> dict[str, Any] | None:
    return read_json_object(run / name) if run is not None and (run / name).exists() else None


def _read(folder: Path, quick: bool) -> RunStatus:
    """Read the status of one checkpoint, without its masks if `quick`."""
    checkpoint = Checkpoint(folder)
    state = checkpoint.client_state.get("sparseforge")
    tokens = checkpoint.launcher_state.get("tokens")
    train_steps = checkpoint.launcher_state.get("steps")
    trained = [name for name in checkpoint.shapes if name not in checkpoint.buffers]
    dtypes = {str(checkpoint.entries[name].trained_dtype).removeprefix("torch.") for name in trained}
    # A foreign checkpoint has no state of a forge.
    forge_fields: dict[str, Any] = {}
    if state is not None:
        saved = RunState.parse(state, str(folder))
        saved.check_shapes(checkpoint.shapes, str(folder))
        config = saved.config
        step = saved.step
        schedule = config.resolved_schedule
        steps = train_steps if type(train_steps) is int else config.max_steps
        forge_fields = {
            "step": step,
            "pattern": config.pattern,
            "max_steps": steps,
            "phase": phase(config, step, steps),
            "hardening": schedule.hardening if isinstance(schedule, Schedule) else None,
            "masked_weights": len(saved.weights),
            "masked_parameters": sum(math.prod(weight.shape) for weight in saved.weights),
            "branch_parameters": sum(math.prod(s) for name, s in checkpoint.shapes.items() if name.endswith(BRANCH)),
        }
        if not quick:
            bar = tqdm(saved.weights, unit=" weights", disable=None)
            released = step >= config.release_step
            masks = [_read_mask(checkpoint, weight, config.parsed_pattern, released) for weight in bar]
            forge_fields["masks"] = sorted(masks, key=lambda mask: (-mask.strange, -mask.undecided, mask.binary))
    return RunStatus(
        **{"step": checkpoint.step, **forge_fields},
        world_size=checkpoint.world_size,
        zero_stage=checkpoint.stage,
        precision=", ".join(sorted(dtypes)),
        parameters=sum(math.prod(checkpoint.shapes[name]) for name in trained),
        tokens=tokens if type(tokens) is int else None,
    )


def _read_mask(checkpoint: Checkpoint, weight: SparseWeight, pattern: Pattern, released: bool) -> MaskReport:
    """Read one mask, of which one bit a weight is left once it is `released`, and describe it."""
    # All experts of a layer may be one tensor of billions of numbers: read it a part at a time.
    parts = []
    for start, stop in chunk_ranges(math.prod(weight.shape), pattern.period(weight.shape, weight.input_axis)):
        masked = read_masked(checkpoint, weight.name, released, start, stop)
        mask_GM, dense_GM = (pattern.to_groups(part, weight.shape, weight.input_axis) for part in masked)
        parts.append(mask_report(weight.name, mask_GM, dense_GM, pattern))
    report = parts[0] if len(parts) == 1 else replace(summarize_masks(parts), name=weight.name)
    return replace(report, magnitude_agreement=None) if released else report
