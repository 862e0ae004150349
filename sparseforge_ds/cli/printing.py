"""Output of commands: text from untrusted files on a terminal, and the file of `--json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.disk import write_json


def printable(text: str) -> str:
    """Return a text with escapes for line breaks and for all characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def require_json_file(name: str | None, inputs: Iterable[str | None] = ()) -> None:
    """Reject a file of `--json` that cannot be written or holds something else, before anything is measured.

    Args:
        name: value of `--json`; None passes.
        inputs: what the command reads, files and folders, which the report must leave alone.
    """
    if name is None:
        return
    if _is_stream(Path(name)):
        return
    path = Path(name).resolve()
    if not path.parent.is_dir():
        folder = path.parent if Path(name).is_symlink() else Path(name).parent
        raise ValueError(f"--json {name}: cannot be written, there is no folder {folder}")
    if path.is_dir():
        raise ValueError(f"--json {name}: is a folder; give a file")
    if path.exists() and not _may_be_replaced(path):
        raise ValueError(f"--json {name}: is there already, and is no report; give another name")
    for given in inputs:
        if given and Path(given).exists() and (path == Path(given).resolve() or Path(given).resolve() in path.parents):
            raise ValueError(f"--json {name}: belongs to {given}, which is read; give a name elsewhere")
    require_writable(path.parent, f"--json {name}")


def write_report(name: str, report: dict[str, Any]) -> None:
    """Write the file of `--json`; it appears when it is complete, where it is a file."""
    if _is_stream(Path(name)):
        sys.stdout.flush()  # what was printed comes first, where both go to one file
        with Path(name).open("a") as stream:
            stream.write(json.dumps(report, indent=2) + "\n")
    else:
        write_json(Path(name).resolve(), report)


def _may_be_replaced(path: Path) -> bool:
    """Return whether a file is empty or begins as our reports do."""
    with path.open("rb") as file:
        return file.read(2) in (b"", b"{\n")


def _is_stream(path: Path) -> bool:
    """Return whether a path is a terminal, a pipe or a device, or /dev/stdout whatever that is: no file replaces it."""
    is_device = path.absolute().parts[1:2] == ("dev",)
    return path.exists() and not path.is_dir() and (is_device or not path.is_file())


def require_writable(path: Path, who: str) -> None:
    """Reject a folder that cannot be written into, before work starts.

    Args:
        path: of the folder; it and folders above it may be missing.
        who: beginning of the error message.
    """
    present = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(present, os.W_OK):
        raise ValueError(f"{who}: cannot be written, {present} does not allow it; give another place")
