"""Checks that checkpoints are intact, byte for byte. `inventory` checks names and sizes alone, which costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sparseforge_ds.checkpoint.folder import MANIFEST, list_checkpoints, list_files
from sparseforge_ds.checkpoint.inventory import SavedCheckpoint, describe_checkpoint
from sparseforge_ds.checkpoint.manifest import FormatVersionError, Manifest, check_pt_file


def check_intact(folder: Path) -> None:
    """Read every byte of a checkpoint.

    Raises:
        ValueError: a file is missing, or its bytes are not those of its checksums.
    """
    if (folder / MANIFEST).exists():
        manifest = Manifest.read(folder)
        manifest.check_sizes()
        for name in manifest.files:
            manifest.check_file(name)
        return
    files = list_files(folder)
    for path in (*files.model, *files.optimizer):
        check_pt_file(path)


def verify_checkpoint(folder: Path) -> SavedCheckpoint:
    """Describe a checkpoint after reading every byte of it."""
    entry = describe_checkpoint(folder)
    try:
        check_intact(folder)
    except ValueError as error:
        return replace(entry, problem=entry.problem or str(error), damaged=entry.complete)
    return entry


@contextmanager
def suggest_intact_checkpoint(folder: Path) -> Iterator[None]:
    """Append the newest intact sibling, if there are siblings, to a ValueError about a damaged checkpoint.

    The error of a checkpoint that is intact, or of another version, passes unchanged.
    """
    try:
        yield
    except FormatVersionError:
        raise
    except (ValueError, FileNotFoundError) as error:
        if not folder.is_dir():
            raise ValueError(
                f"{folder}: was removed while it was read, as a run does with its older checkpoints; repeat the "
                "command, or train with a larger --keep_checkpoints"
            ) from None
        siblings = [sibling for sibling in list_checkpoints(folder.parent) if sibling.name != folder.name]
        if not siblings or verify_checkpoint(folder).complete:
            raise
        intact = next((sibling for sibling in reversed(siblings) if verify_checkpoint(sibling).complete), None)
        advice = f"the newest intact one beside it is {intact}" if intact else "no other one beside it is intact"
        raise ValueError(f"{error}; {advice}") from None
