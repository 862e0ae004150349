"""What lies in a `checkpoints` folder: which checkpoints are whole, which is the newest, what a crash left behind.

Reads names, sizes and manifests, and opens no `.pt` file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparseforge_ds.checkpoint.folder import MANIFEST, list_checkpoints, list_files, newest_checkpoint
from sparseforge_ds.checkpoint.manifest import Manifest

_STEP = re.compile(r"\d+")


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint of a run."""

    name: str
    step: int | None
    """Of its manifest, or else what its name says."""
    bytes: int
    problem: str | None
    """Why it is not whole, or None."""
    damaged: bool = False
    """Whether all is there, but not as it was written; known where its bytes were read."""

    @property
    def complete(self) -> bool:
        """Every file is there, has the size that was written and, where its bytes were read, its checksums."""
        return self.problem is None


@dataclass(frozen=True)
class Inventory:
    """A `checkpoints` folder."""

    entries: list[SavedCheckpoint]
    """By step."""
    leftovers: list[str]
    """What interrupted saves left behind; the next start of the run removes it."""
    current: SavedCheckpoint | None
    """The newest checkpoint, from which a run goes on and which is exported."""
    problem: str | None
    """Why nobody can tell which one that is."""


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is, or was meant to be, one checkpoint."""
    return (folder / MANIFEST).exists() or any(folder.glob("*_states.pt"))


def take_inventory(folder: Path) -> Inventory:
    """Look at every checkpoint in a folder."""
    current, problem = None, None
    try:
        children = sorted(folder.iterdir()) if folder.is_dir() else []
        leftovers = [child.name for child in children if child.suffix == ".tmp"]
        found = [child for child in children if child.is_dir() and child.suffix != ".tmp" and is_checkpoint(child)]
        entries = [describe_checkpoint(child) for child in {*list_checkpoints(folder), *found}]
        entries.sort(key=lambda entry: (-1 if entry.step is None else entry.step, entry.name))
        newest = newest_checkpoint(folder)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error})") from None
    except ValueError as error:
        newest, problem = None, str(error)
    if newest is not None:
        current = describe_checkpoint(newest)
    elif entries:
        current, problem = entries[-1], problem or f"{folder / 'latest'}: no such file"
    return Inventory(entries, leftovers, current, problem)


def describe_checkpoint(folder: Path) -> SavedCheckpoint:
    """One checkpoint: its files against its manifest, or against each other where DeepSpeed alone saved it."""
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    digits = _STEP.findall(folder.name)
    step = int(digits[-1][:18]) if digits else None
    try:
        if (folder / MANIFEST).exists():
            manifest = Manifest.read(folder)
            step = manifest.step
            manifest.check_sizes()
        else:
            list_files(folder)
    except ValueError as error:
        return SavedCheckpoint(folder.name, step, size, str(error))
    return SavedCheckpoint(folder.name, step, size, None)
