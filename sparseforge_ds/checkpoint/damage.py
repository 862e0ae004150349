"""Which checkpoints are whole, byte for byte. `inventory` tells by names and sizes, which costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sparseforge_ds.checkpoint.folder import MANIFEST, list_checkpoints, list_files
from sparseforge_ds.checkpoint.inventory import SavedCheckpoint, describe_checkpoint
from sparseforge_ds.checkpoint.manifest import Manifest, check_content


def check_intact(folder: Path) -> None:
    """Read every byte of a checkpoint. Raises ValueError where it differs from its checksums, or a file is missing."""
    if (folder / MANIFEST).exists():
        manifest = Manifest.read(folder)
        manifest.check_sizes()
        for name in manifest.files:
            manifest.check_file(name)
        return
    files = list_files(folder)
    for path in (*files.model, *files.optimizer):
        check_content(path)


def verify_checkpoint(folder: Path) -> SavedCheckpoint:
    """`describe_checkpoint` of a checkpoint that is read whole."""
    entry = describe_checkpoint(folder)
    try:
        check_intact(folder)
    except ValueError as error:
        return replace(entry, problem=entry.problem or str(error), damaged=entry.complete)
    return entry


@contextmanager
def suggest_intact_checkpoint(folder: Path) -> Iterator[None]:
    """Add to a ValueError about a checkpoint which other one of its run is the newest that is whole, if there are
    others."""
    try:
        yield
    except ValueError as error:
        others = [other for other in list_checkpoints(folder.parent) if other.name != folder.name]
        if not others:
            raise
        whole = next((other for other in reversed(others) if verify_checkpoint(other).complete), None)
        said = f"the newest whole one beside it is {whole}" if whole else "no other one beside it is whole"
        raise ValueError(f"{error}; {said}") from None
