"""What lies in a `checkpoints` folder: which checkpoints are whole, what `latest` names, what a crash left behind.

Reads names, sizes and manifests, and opens no `.pt` file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparseforge_ds.checkpoint.folder import is_portable, list_files
from sparseforge_ds.checkpoint.manifest import NAME as MANIFEST
from sparseforge_ds.checkpoint.manifest import Manifest

_STEP = re.compile(r"\d+")


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a run."""

    name: str
    step: int | None
    """Of its manifest, or else what its name says."""
    bytes: int
    problem: str | None
    """Why it is not whole, or None."""

    @property
    def complete(self) -> bool:
        """Every file is there, and has the size that was written."""
        return self.problem is None


@dataclass(frozen=True)
class Inventory:
    """A `checkpoints` folder."""

    folder: Path
    latest: str | None
    """What the file `latest` names, if there is one."""
    latest_problem: str | None
    """Why that is no checkpoint."""
    entries: list[Entry]
    """By step."""
    leftovers: list[str]
    """What interrupted saves left behind; the next start of the run removes it."""

    @property
    def current(self) -> Entry | None:
        """The checkpoint that `latest` names, or else the newest."""
        named = next((entry for entry in self.entries if entry.name == self.latest), None)
        return named or (self.entries[-1] if self.entries else None)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is, or was meant to be, one checkpoint."""
    return (folder / MANIFEST).exists() or is_portable(folder) or any(folder.glob("*_states.pt"))


def take_inventory(folder: Path) -> Inventory:
    """Look at every checkpoint in a folder.

    Raises:
        ValueError: the folder or its `latest` cannot be read.
    """
    try:
        children = sorted(folder.iterdir()) if folder.is_dir() else []
        latest_file = folder / "latest"
        latest = latest_file.read_text(errors="replace").strip()[:200] if latest_file.is_file() else None
        leftovers = [child.name for child in children if child.suffix in (".tmp", ".next")]
        folders = [child for child in children if child.is_dir() and child.name not in leftovers]
        entries = [take_entry(child) for child in folders if is_checkpoint(child)]
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error})") from None
    entries.sort(key=lambda entry: (-1 if entry.step is None else entry.step, entry.name))
    problem = None
    if latest is None:
        problem = f"{latest_file}: no such file" if entries else None
    elif latest not in [entry.name for entry in entries]:
        problem = f"{latest_file}: names {latest[:80]!r}, which is no checkpoint beside it"
    return Inventory(folder, latest, problem, entries, leftovers)


def take_entry(folder: Path) -> Entry:
    """One checkpoint: its files against its manifest, or against each other where DeepSpeed alone saved it.

    Raises:
        OSError: the folder cannot be read.
    """
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    digits = _STEP.findall(folder.name)
    step = int(digits[-1][:18]) if digits else None
    try:
        if (folder / MANIFEST).exists():
            manifest = Manifest.read(folder)
            step = manifest.step
            manifest.check_sizes()
        elif not is_portable(folder):
            list_files(folder)
    except ValueError as error:
        return Entry(folder.name, step, size, str(error))
    return Entry(folder.name, step, size, None)
