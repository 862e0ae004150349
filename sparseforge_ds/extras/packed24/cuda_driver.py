"""CUDA source compiled by NVRTC and launched through NVIDIA's driver, by ctypes: no toolkit has to be installed.

torch brings NVRTC along, and where a GPU is there is a driver. torch's own `_compile_kernel` is private, is not in
every torch that this package allows, takes no null pointers, and costs several times as much at each launch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock

import torch

_DYNAMIC_SHARED_MEMORY = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_MOST_SHARED_MEMORY = 97
"""CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN."""
_NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: this thread has not used the GPU yet."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: a kernel may be loaded while this thread captures a graph."""


def compile_cubin(source: str, architecture: str, options: Sequence[str]) -> bytes:
    """The machine code of a source, for `architecture` as in "sm_90".

    Raises:
        OSError: NVRTC is not there.
        RuntimeError: it does not compile; the message is NVRTC's.
    """
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    given = [option.encode() for option in (f"--gpu-architecture={architecture}", "--std=c++17", *options)]
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"linear24.cu", 0, None, None):
        raise RuntimeError("NVRTC cannot create a program")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
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
    """As (13, 0).

    Raises:
        OSError: NVRTC is not there.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def _nvrtc() -> ctypes.CDLL:
    """That of torch's CUDA version: in a wheel beside torch, or where the loader looks."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    for folder in (Path(place) / "nvidia" for place in sys.path):
        for library in sorted(folder.glob(f"*/lib/{name}")):
            for part in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))  # NVRTC opens it by its name, and does not look beside itself
            return ctypes.CDLL(str(library))
    return ctypes.CDLL(name)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA cannot {what}: {(text.value or b'unknown error').decode()}")


def _bind(device: int) -> None:
    """Make torch's context of a device this thread's one."""
    context = ctypes.c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "find the context of the GPU")
    _check(_driver().cuCtxSetCurrent(context), "use the context of the GPU")


def most_shared_memory(device: int) -> int:
    """Bytes that a block may have."""
    size = ctypes.c_int()
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(size), _MOST_SHARED_MEMORY, device), "be asked about the GPU")
    return size.value


class Module:
    """Machine code on one device, for as long as the process lives."""

    def __init__(self, cubin: bytes, device: int) -> None:
        """Load it.

        Raises:
            RuntimeError: it cannot be loaded; the message is the driver's.
        """
        self.device = device
        self._module = ctypes.c_void_p()
        driver, mode = _driver(), ctypes.c_int(_RELAXED)
        with torch.cuda.device(device):
            _bind(device)
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            try:
                _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin), "load a kernel")
            finally:
                driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def function(self, name: str) -> ctypes.c_void_p:
        """A kernel, which may have all the dynamic shared memory that a block can: several launches share it.

        Raises:
            RuntimeError: it is not there.
        """
        found, most = ctypes.c_void_p(), most_shared_memory(self.device)
        with torch.cuda.device(self.device):
            _bind(self.device)  # this may be the first that a thread does with the GPU
            _check(_driver().cuModuleGetFunction(ctypes.byref(found), self._module, name.encode()), f"find {name}")
            _check(_driver().cuFuncSetAttribute(found, _DYNAMIC_SHARED_MEMORY, most), "give shared memory")
        return found


class Launch:
    """A kernel with all that does not change from one call to the next."""

    def __init__(
        self,
        module: Module,
        name: str,
        grid: tuple[int, int],
        threads: int,
        shared_memory: int,
        pointers: int,
        sizes: Sequence[int],
    ) -> None:
        """Its arguments are so many pointers, and `sizes` behind them.

        Raises:
            RuntimeError: the module does not have it.
        """
        self._device, self._start = module.device, _driver().cuLaunchKernel
        self._pointers, self._sizes = (ctypes.c_uint64 * pointers)(), (ctypes.c_int * len(sizes))(*sizes)
        places = [ctypes.addressof(self._pointers) + 8 * i for i in range(pointers)]
        places += [ctypes.addressof(self._sizes) + 4 * i for i in range(len(sizes))]
        self._places = (ctypes.c_void_p * len(places))(*places)
        shape = [ctypes.c_uint(size) for size in (*grid, 1, threads, 1, 1, shared_memory)]
        self._fixed = (module.function(name), *shape)
        self._lock = Lock()  # of the arguments, which the driver copies

    def __call__(self, stream: int, *pointers: int) -> None:
        """Launch it on a stream of its device, which is the current one.

        Raises:
            RuntimeError: the driver refuses.
        """
        with self._lock:
            self._pointers[:] = list(pointers)
            code = self._start(*self._fixed, ctypes.c_void_p(stream), self._places, None)
            if code == _NO_CONTEXT:
                _bind(self._device)
                code = self._start(*self._fixed, ctypes.c_void_p(stream), self._places, None)
        if code:
            _check(code, "launch a kernel")
