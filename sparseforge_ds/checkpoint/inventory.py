"""Inventory of a `checkpoints` folder: complete checkpoints, the newest, and what a crash left behind.

It reads names, sizes and manifests, and opens no `.pt` file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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
    """Step in its manifest, or else in its name."""
    bytes: int
    """Size of all its files."""
    problem: str | None
    """Reason why it is not complete or not intact, or None."""
    damaged: bool = False
    """True if every file is there, but some bytes are not as they were written; known only if bytes were read."""

    @property
    def complete(self) -> bool:
        """True if every file is there in the size that was written, and with its checksums if bytes were read."""
        return self.problem is None


@dataclass(frozen=True)
class Inventory:
    """Content of a `checkpoints` folder."""

    entries: list[SavedCheckpoint]
    """All checkpoints, in the order of their steps."""
    leftovers: list[str]
    """Names of folders and files that interrupted saves left behind; the next launch of the run removes them."""
    current: SavedCheckpoint | None
    """Newest checkpoint, from which a run continues and which is exported."""
    problem: str | None
    """Reason why the newest checkpoint is not known, or None."""


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is one checkpoint, complete or not."""
    return (folder / MANIFEST).exists() or any(folder.glob("*_states.pt"))


def take_inventory(folder: Path) -> Inventory:
    """List every checkpoint in a folder, and find the newest."""
    current = None
    problem = None
    try:
        children = sorted(folder.iterdir()) if folder.is_dir() else []
        leftovers = [child.name for child in children if child.suffix == ".tmp"]
        folders = [child for child in children if child.is_dir() and child.suffix != ".tmp" and is_checkpoint(child)]
        entries = describe_all({*list_checkpoints(folder), *folders}, describe_checkpoint)
        entries.sort(key=lambda entry: (-1 if entry.step is None else entry.step, entry.name))
        newest = newest_checkpoint(folder)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error})") from None
    except ValueError as error:
        newest = None
        problem = str(error)
    # Without a pointer to the newest checkpoint, the last entry stands for it, with the reason.
    if newest is not None:
        try:
            current = describe_checkpoint(newest)
        except FileNotFoundError:
            if newest.is_dir():
                raise
            return take_inventory(folder)  # a run has saved another, and removed this one
    elif entries:
        current = entries[-1]
        problem = problem or f"{folder / 'latest'}: no such file"
    return Inventory(entries, leftovers, current, problem)


def describe_all(folders: Iterable[Path], describe: Callable[[Path], SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Describe each folder with `describe`; skip checkpoints that a run removes meanwhile."""
    entries = []
    for folder in folders:
        try:
            entry = describe(folder)
        except FileNotFoundError:
            if folder.is_dir():
                raise
            continue
        if folder.is_dir():
            entries.append(entry)
    return entries


def describe_checkpoint(folder: Path) -> SavedCheckpoint:
    """Describe one checkpoint by its files' sizes in its manifest, or by its files' names if it has no manifest."""
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
