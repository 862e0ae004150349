"""Processes that started this one, noted before anything large is imported: a launcher may be killed meanwhile."""

import os
from pathlib import Path
from typing import NamedTuple


class Ancestor(NamedTuple):
    """A process as it was when this one began."""

    pid: int
    command: tuple[str, ...]
    """Its words; none where they cannot be read."""


def _note(pid: int) -> Ancestor:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it is gone, or this system has no /proc
        words = []
    return Ancestor(pid, tuple(words[:-1]))


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


PARENT = _note(os.getppid())
GRANDPARENT = _note(_parent_of(PARENT.pid))
