"""Processes that started this one, noted before anything large is imported: a launcher may be killed meanwhile."""

import os
import time
from pathlib import Path
from typing import NamedTuple

_PATIENCE = 1.0
"""Seconds that a parent without a command line gets to end; it needs some hundredths."""


class Ancestor(NamedTuple):
    """A process as it was when this one began."""

    pid: int
    command: tuple[str, ...]
    """Its words; none where they cannot be read."""


def note_parent_of(child: int) -> Ancestor:
    """Return the parent of a process, or who adopted the process if the parent is ending right now.

    A process that ends loses its command line some hundredths of a second before its children get another parent.
    Taken as it is then, it would be a launcher that nobody recognises, and whose end nobody notices.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        pid = os.getppid() if child == os.getpid() else _parent_of(child)
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            is_unreadable = False
        except OSError:  # it is gone, or this system has no /proc
            words = []
            is_unreadable = _parent_of(child) in (0, pid)
        if words or is_unreadable or time.monotonic() > deadline:
            return Ancestor(pid, tuple(words))
        time.sleep(0.001)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


PARENT = note_parent_of(os.getpid())
GRANDPARENT = note_parent_of(PARENT.pid)
