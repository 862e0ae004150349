"""Compilers of extensions: locks of those that were killed, and errors of those that fail.

torch lets one process at a time compile an extension: the file `lock` in the extension's folder exists for as long, and
all others wait until it is gone. A compiler that is killed leaves it, and every later process waits for ever, without
a word.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

_LOG = logging.getLogger(__name__)
OWN = "sparseforge_"
"""First letters of the names of this package's extensions."""
GIVEN_UP_SECONDS = 300.0
"""Seconds without a change in its folder after which a compiler counts as killed; one source file takes one or two."""
_REMIND = 60.0
_POLL = 0.5
BRIEF_SECONDS = 3.0
"""Seconds for which a lock is nothing to speak of: ranks that load what is compiled hold it too."""


def clear_extension_locks() -> None:
    """Wait for the compilers at work in torch's folder of extensions, and remove the locks that killed ones left.

    One process of every machine calls it before DeepSpeed does anything. Extensions of this package are left out, since
    training does not need them. It looks at times of files only, so that it does not matter whose process the compiler
    is, or on which machine.

    Raises:
        OSError: a lock that was left cannot be removed.
    """
    root = _extension_folder()
    if all(map(_is_own, root.rglob("*.so"))):
        _LOG.info("set-up: what DeepSpeed needs is compiled for this machine once, which takes a minute or two")
    for lock in root.rglob("lock"):
        if not _is_own(lock):
            clear_lock(lock)


@cache
def clear_before_training() -> None:
    """Do `clear_extension_locks` once, in the first process of every machine, which the launcher numbers."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        clear_extension_locks()


def release_locks() -> None:
    """Remove the locks that this process holds, before it ends without torch's own clean-up.

    A process that already waits for such a lock would wait for ever: it has called `clear_extension_locks` already.
    Where files cannot be listed or removed, locks stay, as after a kill.
    """
    root = _extension_folder().resolve()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):  # torch keeps a lock open for as long as it holds it
            with contextlib.suppress(OSError):
                lock = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                if lock.name == "lock" and lock.is_relative_to(root):
                    lock.unlink()


@contextlib.contextmanager
def extension_errors() -> Iterator[None]:
    """Turn the failed build of an extension in the block into a ValueError of one line.

    torch's error is the whole output of the compiler, from DeepSpeed's `FusedAdam` or its reduction over shared memory.
    Processes that waited for the compiler miss its library instead.
    """
    cure = (
        "it needs a C++ compiler and the headers of Python (Debian and Ubuntu: apt install g++ python3-dev), and on "
        'GPUs CUDA\'s nvcc; for FusedAdam alone "torch_adam": true in the parameters of the optimizer does without'
    )
    try:
        yield
    except ImportError as error:
        if error.path is None or Path(error.path).suffix != ".so" or Path(error.path).exists():
            raise
        raise ValueError(
            f"DeepSpeed's extension {Path(error.path).stem} is missing: another process of this machine could not "
            f"compile it, and has printed why; {cure}"
        ) from None
    except RuntimeError as error:
        text = str(error)
        if "Ninja is required" in text or "ninja not being installed" in text:
            raise ValueError(
                "DeepSpeed compiles extensions with ninja, which is not on PATH; activate the environment that has it, "
                "or pip install ninja"
            ) from None
        if (header := re.match(r"Error building extension '(.*?)'", text)) is None:
            raise
        # The failure is a line of its own; commands stand beside it, whose flags may have any word.
        lines = [line.strip() for line in text.splitlines()]
        failures = [line for line in lines if re.search(r"\berror: |: not found$|: No such file", line)]
        cause = (failures or lines)[0]
        raise ValueError(
            f"DeepSpeed's extension {header[1]} cannot be compiled on this machine ({cause:.300}); {cure}"
        ) from None


def _extension_folder() -> Path:
    """Return the folder in which torch compiles extensions."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def _is_own(file: Path) -> bool:
    """Return True for a file in the folder of one of our own extensions."""
    return file.parent.name.startswith(OWN)


def clear_lock(lock: Path) -> None:
    """Wait until a lock is gone, or remove it once its compiler counts as killed."""
    began = time.monotonic()
    reminded = -_REMIND
    while (idle := _idle_seconds(lock)) is not None:
        waited = time.monotonic() - began
        if idle >= GIVEN_UP_SECONDS:
            lock.unlink(missing_ok=True)
            _LOG.warning("removed %s, left by a process that was killed while it compiled", lock)
            break
        if waited >= BRIEF_SECONDS and waited - reminded >= _REMIND:
            _LOG.warning(
                "waiting for a process that compiles, or was killed while it did: %s is removed when nothing has "
                "changed beside it for %d s; if nothing compiles there: rm %s",
                *(lock, GIVEN_UP_SECONDS, lock),
            )
            reminded = waited
        time.sleep(_POLL)


def _idle_seconds(lock: Path) -> float | None:
    """Since something has changed in the lock's folder; None once the lock is gone."""
    changes = []
    with contextlib.suppress(FileNotFoundError):  # someone clears the folder
        for file in list(lock.parent.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                changes.append(file.stat().st_mtime)
    return max(0.0, time.time() - max(changes)) if lock.exists() and changes else None
