"""Atomic files and folders: each gets its final name once all of it is on the disk, so a power cut leaves no half."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Name the file that is written in an error of the block about a full disk, which carries no path."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with name_in_errors(path):
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
    """Open a file in a folder of ours for writing, and create it if it is missing.

    Raises:
        ValueError: it is a link, whose target would be overwritten.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path}: is a link, whose target is not written to; remove it") from None


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets its name at the end of the block; after an error nothing of it stays.

    Its temporary name is unique: two runs may fill one folder at once (sparseforge compare), with equal bytes.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with name_in_errors(path), temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.absolute().parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, temporary: Path | None = None, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that gets its name at the end of the block; after an error nothing of it stays.

    What a killed process left under the temporary name is removed first. With `replace`, `path.old` is removed once the
    new folder has its name, even one that a killed process left. Parents that are made here go again after an error.

    Args:
        path: final name. No folder may have it by then, or an empty one.
        temporary: name until then; by default `path` with `.tmp`.
        replace: let a folder exist at `path`. It keeps its name until the new one is on the disk, and is then removed.
    """
    temporary = temporary or path.with_name(f"{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    made_parents = [parent for parent in temporary.parents if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_tree(temporary)
        # A folder with content cannot be replaced in one step: the old one is moved aside first.
        previous = path.with_name(f"{path.name}.old")
        if replace and path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.replace(previous)
        temporary.replace(path)
        if replace and previous.exists():
            shutil.rmtree(previous)
        sync(path.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        # The innermost comes first. One with anything in it stays, as after success.
        with contextlib.suppress(OSError):
            for parent in made_parents:
                parent.rmdir()


def require_writable(path: Path, who: str) -> None:
    """Reject a folder that cannot be written into, before work starts.

    Args:
        path: of the folder; it and folders above it may be missing.
        who: beginning of the error message.
    """
    present = next(parent for parent in (path, *path.parents) if parent.exists())
    if not present.is_dir():
        raise ValueError(f"{who}: cannot be written, {present} is a file; give another place")
    if not os.access(present, os.W_OK):
        raise ValueError(f"{who}: cannot be written, {present} does not allow it; give another place")


def reserve(path: Path, size: int) -> None:
    """Make a file exactly so large, with all its room taken: a full disk would end a process that maps it by SIGBUS.

    Raises:
        OSError: the disk is too full; it names the file.
        ValueError: the file is a link.
    """
    handle = open_own_file(path, os.O_RDWR)
    try:
        with name_in_errors(path):
            os.ftruncate(handle, min(size, os.fstat(handle).st_size))
            os.posix_fallocate(handle, 0, max(1, size))
    finally:
        os.close(handle)


def take_lock(path: Path, refusal: str, remedy: str) -> int:
    """Lock a file until its handle is closed, or this process ends, also by a kill.

    Args:
        path: of the file, which is created if it is missing, and says who has it.
        refusal: what the error says another process does.
        remedy: what the error advises.

    Returns:
        The handle of the open file.

    Raises:
        ValueError: another process has the lock, or the file is a link.
    """
    lock = open_own_file(path, os.O_RDWR)
    try:
        if not _lock(lock, fcntl.LOCK_EX, refusal, remedy):
            _LOG.warning("%s is on a file system without locks: do not start a second process there", path.parent)
    except (ValueError, OSError):
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock


def require_unlocked(path: Path, refusal: str, remedy: str) -> None:
    """Raise the ValueError of `take_lock` if a process has the lock. Nothing is written, and nothing stays locked."""
    try:
        file = path.open()
    except FileNotFoundError:
        return
    with file:
        _lock(file.fileno(), fcntl.LOCK_SH, refusal, remedy)


def _lock(handle: int, kind: int, refusal: str, remedy: str) -> bool:
    """Lock an open file, or return False on a file system without locks; errors are those of `take_lock`."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace").strip()
        raise ValueError(f"{refusal} ({holder or 'of an unknown process'}); {remedy}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, refusal: str, remedy: str) -> Iterator[None]:
    """Hold a lock in the block; see `take_lock`."""
    lock = take_lock(path, refusal, remedy)
    try:
        yield
    finally:
        os.close(lock)


def write_json(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    """Write an atomic file of JSON, indented for people to read. A config.json keeps the Infinity that it has."""
    with atomic_file(path) as file:
        file.write(json_bytes(content, indent))


def json_bytes(content: dict[str, Any], indent: int | None = 2) -> bytes:
    """Return the bytes that `write_json` writes."""
    return (json.dumps(content, indent=indent) + "\n").encode()


def measurements_text(content: Any, indent: int | None = None) -> str:
    """Return measurements as JSON, with null in place of NaN and Infinity, which JSON does not have."""
    return json.dumps(finite(content), indent=indent, allow_nan=False)


def finite(content: Any) -> Any:
    """Return content with None in place of every float that is not finite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
