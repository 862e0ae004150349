"""Compiles the no-op CUDA device of shim.cpp once, and loads it into a process that has not imported torch yet."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")


def missing_compiler() -> str | None:
    """Return why the shim cannot be built here, or None if it can."""
    return None if shutil.which("g++") else "g++ is not installed; it compiles the no-op CUDA device of fake tensors"


def built() -> Path:
    """Return the compiled shim of this source and this torch, and compile it if missing; torch is not imported.

    Raises:
        RuntimeError: the compiler is missing or fails.
    """
    if why := missing_compiler():
        raise RuntimeError(why)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    torch_folder = Path(spec.origin).parent
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(SOURCE.read_bytes() + f"{version} {torch_folder}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(tempfile.gettempdir()) / f"fake_cuda_{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"fake_cuda_{key}.so"
    if library.exists():
        return library
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the process ends, however it ends
        if not library.exists():
            unfinished = library.with_suffix(".tmp")
            where = [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"]
            command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), *where, "-lc10", "-ltorch_cpu"]
            done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
            unfinished.rename(library)
    return library


def load() -> None:
    """Make fake CUDA tensors usable in this process.

    Raises:
        RuntimeError: torch was imported before, and has found no CUDA for good.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the no-op CUDA device must be loaded before torch is imported: start a fresh process")
    ctypes.CDLL(str(built()))
