"""Compilation of CUDA source by NVRTC and launches through NVIDIA's driver, by ctypes, without a CUDA toolkit.

NVRTC comes with torch, and the driver with the GPU. torch's own `_compile_kernel` is private and missing in some
versions of torch that this package allows. It takes no null pointers and makes each launch several times as expensive.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch

_DYNAMIC_SHARED_MEMORY = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_SHARED_MEMORY_LIMIT = 97
"""CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN."""
_NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: the thread has not used the GPU yet."""
_OVERLAPS = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: a kernel may be loaded while this thread captures a graph."""


def compile_cubin(source: str, architecture: str, options: Sequence[str]) -> bytes:
    """Compile a source to machine code for an architecture like "sm_90".

    Raises:
        OSError: NVRTC is missing.
        RuntimeError: the source does not compile; the message is NVRTC's.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    arguments = [option.encode() for option in (f"--gpu-architecture={architecture}", "--std=c++17", *options)]
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"linear24.cu", 0, None, None):
        raise RuntimeError("NVRTC cannot create a program")
    try:
        # The machine code, or the compiler's messages.
        failed = nvrtc.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
        kind = "ProgramLog" if failed else "CUBIN"
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, text)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"NVRTC: {text.value.decode(errors='replace').strip()}")
    return text.raw


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version, like (13, 0).

    Raises:
        OSError: NVRTC is missing.
    """
    major = ctypes.c_int()
    minor = ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def _nvrtc() -> ctypes.CDLL:
    """Load the NVRTC of torch's CUDA version, from a wheel beside torch or from the loader's path."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    for folder in (Path(entry) / "nvidia" for entry in sys.path):
        for library in sorted(folder.glob(f"*/lib/{name}")):
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # NVRTC opens it by its name alone, so it must be loaded already
            return ctypes.CDLL(str(library))
    return ctypes.CDLL(name)


@cache
def load_driver() -> ctypes.CDLL:
    """Load NVIDIA's driver."""
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, action: str) -> None:
    """Raise RuntimeError with the driver's message if a call has failed."""
    if code:
        text = ctypes.c_char_p()
        load_driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA cannot {action}: {(text.value or b'unknown error').decode()}")


def _bind(device: int) -> None:
    """Make torch's context of a device the current one of this thread."""
    context = ctypes.c_void_p()
    _check(load_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "find the context of the GPU")
    _check(load_driver().cuCtxSetCurrent(context), "use the context of the GPU")


def shared_memory_limit(device: int) -> int:
    """Return the bytes of shared memory that a block may have."""
    size = ctypes.c_int()
    _check(load_driver().cuDeviceGetAttribute(ctypes.byref(size), _SHARED_MEMORY_LIMIT, device), "describe the GPU")
    return size.value


class Module:
    """Machine code on one device, which stays loaded until the process ends."""

    def __init__(self, cubin: bytes, device: int) -> None:
        """Load machine code.

        Raises:
            RuntimeError: the driver refuses; the message is the driver's.
        """
        self.device = device
        self._module = ctypes.c_void_p()
        driver = load_driver()
        mode = ctypes.c_int(_RELAXED)
        with torch.cuda.device(device):
            _bind(device)
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            try:
                _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin), "load a kernel")
            finally:
                driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def function(self, name: str) -> ctypes.c_void_p:
        """Find a kernel, and allow it the largest dynamic shared memory: launches of several sizes share it.

        Raises:
            RuntimeError: the module has no such kernel.
        """
        function = ctypes.c_void_p()
        limit = shared_memory_limit(self.device)
        with torch.cuda.device(self.device):
            _bind(self.device)  # the thread may not have used the GPU before
            _check(
                load_driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()), f"find {name}"
            )
            _check(load_driver().cuFuncSetAttribute(function, _DYNAMIC_SHARED_MEMORY, limit), "give shared memory")
        return function


class LaunchShape(NamedTuple):
    """Blocks, threads and memory of a launch."""

    blocks: tuple[int, int]
    threads: int
    """Threads per block."""
    shared_memory: int = 0
    """Bytes of dynamic shared memory per block."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with an int for a value."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("dimensions", ctypes.c_uint * 6),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class Launch:
    """A kernel with the arguments that stay the same from call to call."""

    def __init__(
        self,
        module: Module,
        name: str,
        shape: LaunchShape,
        pointers: int,
        sizes: Sequence[int],
        overlaps: bool = False,
    ) -> None:
        """Prepare a launch.

        Args:
            module: the machine code.
            name: the kernel.
            shape: blocks, threads and memory.
            pointers: number of pointers, the kernel's first arguments.
            sizes: integers, the kernel's other arguments.
            overlaps: True to begin before the kernel ahead in the stream has ended, which the kernel itself awaits.

        Raises:
            RuntimeError: the module has no such kernel.
        """
        self._device = module.device
        self._launch = load_driver().cuLaunchKernelEx if overlaps else load_driver().cuLaunchKernel
        # The driver takes an array of addresses, one for each argument.
        self._pointers = (ctypes.c_uint64 * pointers)()
        self._sizes = (ctypes.c_int * len(sizes))(*sizes)
        addresses = [ctypes.addressof(self._pointers) + 8 * i for i in range(pointers)]
        addresses += [ctypes.addressof(self._sizes) + 4 * i for i in range(len(sizes))]
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self._function = module.function(name)
        self._dimensions = tuple(ctypes.c_uint(size) for size in (*shape.blocks, 1, shape.threads, 1, 1))
        self._memory = ctypes.c_uint(shape.shared_memory)
        self._config: LaunchConfig | None = None
        if overlaps:
            attribute = ctypes.pointer(LaunchAttribute(_OVERLAPS, 0, 1))
            grid = (ctypes.c_uint * 6)(*self._dimensions)
            self._config = LaunchConfig(grid, self._memory, None, attribute, 1)
        self._lock = Lock()  # guards the arguments until the driver has copied them

    def __call__(self, stream: int, *pointers: int, in_order: bool = False) -> None:
        """Launch the kernel on a stream of its device, which must be the current one.

        Args:
            stream: the stream.
            pointers: the kernel's first arguments.
            in_order: True to begin behind the kernel ahead in any case.

        Raises:
            RuntimeError: the driver refuses.
        """
        with self._lock:
            self._pointers[:] = list(pointers)
            if self._config is not None:
                self._config.count = 0 if in_order else 1
            code = self._start(stream)
            if code == _NO_CONTEXT:
                _bind(self._device)
                code = self._start(stream)
        if code:
            _check(code, "launch a kernel")

    def _start(self, stream: int) -> int:
        """Launch the kernel, and return the driver's code."""
        if self._config is not None:
            self._config.stream = stream
            code: int = self._launch(ctypes.byref(self._config), self._function, self._addresses, None)
            return code
        fixed = (self._function, *self._dimensions, self._memory)
        code = self._launch(*fixed, ctypes.c_void_p(stream), self._addresses, None)
        return code
