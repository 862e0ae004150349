"""Output of commands: text from untrusted files on a terminal, and the file of `--json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.disk import finite, measurements_text, require_writable, write_json
from sparseforge_ds.checkpoint.printable_text import printable as printable

_REPORT_KEYS = ({"model", "one_shot", "dtype"}, {"ok", "pattern", "violations"})
"""Keys by which reports of `evaluate` and `verify` are known."""
_LARGEST_REPORT = 2**27
"""Bytes of a larger file, which is none of our reports, and is not read to see."""


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
    for input_path in inputs:
        if input_path and Path(input_path).exists() and Path(input_path).resolve() in (path, *path.parents):
            raise ValueError(f"--json {name}: belongs to {input_path}, which is read; give a name elsewhere")
    require_writable(path.parent, f"--json {name}")


def write_report(name: str, report: dict[str, Any]) -> None:
    """Write the file of `--json`. A regular file appears once it is complete."""
    path = Path(name)
    if not _is_stream(path):
        write_json(path.resolve(), finite(report))
        return
    text = measurements_text(report, indent=2) + "\n"
    # Our own output may be a file, in which a second opening would write over what is printed later.
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        if os.path.samestat(path.stat(), os.fstat(descriptor)):
            stream.write(text)
            return
    with path.open("a") as stream:
        stream.write(text)


def _may_be_replaced(path: Path) -> bool:
    """Return True if a file is empty or holds a report of `evaluate` or `verify`."""
    try:
        if path.stat().st_size > _LARGEST_REPORT:
            return False
        text = path.read_text()
        return not text or any(keys <= json.loads(text).keys() for keys in _REPORT_KEYS)
    except (OSError, ValueError, AttributeError):
        return False


def _is_stream(path: Path) -> bool:
    """Return True if a report is written into this path, a terminal, pipe or device, instead of replacing it."""
    is_device = path.absolute().parent in (Path("/dev"), Path("/dev/fd"))  # /dev/shm has files like any other folder
    return path.exists() and not path.is_dir() and (is_device or not path.is_file())
