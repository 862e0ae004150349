"""Imports of torch, transformers and DeepSpeed: thousands of modules, whose objects stay to the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Keep the objects that are imported in this block out of garbage collection, now and later.

    It saves a fifth to a quarter of the CPU time that these imports take.
    """
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
            atexit.register(gc.unfreeze)  # extensions complain at the end of objects that are not freed
        gc.enable()
