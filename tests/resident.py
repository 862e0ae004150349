"""Resident memory of this process, by which a test bounds what a function holds at most.

Not by tracemalloc: in Python 3.11 it ends the process when it stops while threads of pyarrow allocate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """Give a function that returns the most bytes by which the process has grown since."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    yield lambda: _resident("VmHWM") - before


def _resident(kind: str) -> int:
    """Return the bytes that are resident now (VmRSS), or were at most (VmHWM)."""
    match = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])
