"""Imports of torch, transformers and DeepSpeed: thousands of modules, whose objects stay to the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """No garbage collection walks what is imported in this block, neither meanwhile nor later.

    It takes a third of the CPU time off a short run, or an export of a small model.
    """
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
            atexit.register(gc.unfreeze)  # extensions count what is not freed at the end, and complain of it
        gc.enable()
