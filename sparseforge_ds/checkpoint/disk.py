"""What gets its final name when all of it is on the disk: after a power cut too it is there whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until everything below a folder is on the disk, names included."""
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def open_own_file(path: Path, flags: int) -> int:
    """Open a file of a folder of ours for writing, and make it where it is missing.

    Raises ValueError for a link: what it leads to would be overwritten.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path}: is a link, whose target is not written to; remove it") from None


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name at the end of the block; after an error nothing of it stays.

    Its temporary name is its own: two runs may fill one folder at once (sparseforge compare), with equal bytes.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.absolute().parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, temporary: Path | None = None, replace: bool = False) -> Iterator[Path]:
    """A folder that gets its name at the end of the block, where none is by then, or an empty one; after an error
    nothing of it stays. What a killed process left under the temporary name is removed.

    With `replace` there may be one, which keeps its name until the new one is on the disk, and is then removed.
    """
    temporary = temporary or path.with_name(f"{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_tree(temporary)
        if replace and path.exists():
            before = path.with_name(f"{path.name}.old")
            shutil.rmtree(before, ignore_errors=True)
            path.replace(before)
            temporary.replace(path)
            shutil.rmtree(before)
        else:
            temporary.replace(path)
        sync(path.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    """A whole file of JSON that people read, too."""
    with atomic_file(path) as file:
        file.write((json.dumps(content, indent=indent) + "\n").encode())
