"""The product of few rows with a packed 2:4 weight on NVIDIA's sparse tensor cores, from compute capability 8.0 on.

Their instruction (`mma.sp`) takes kept values and positions as `pack24` leaves them, so that nothing is unpacked and
time is that of reading the packed weight. The kernel is `linear24.cu`; NVRTC compiles it, in some tenths of a second,
when a tiling is first needed in a process. What is not for it goes to `triton_kernel`.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sparseforge_ds.extras.packed24.alignment import whole_words
from sparseforge_ds.extras.packed24.cuda_driver import Launch, Module, compile_cubin, most_shared_memory, nvrtc_version

_LOGGER = logging.getLogger(__name__)

MOST_ROWS = 32
"""On an H200 it is faster than the dense product up to 16 rows and as fast at 32, where Triton's is half as fast."""
UNIT = 64
"""Inputs are a multiple of it."""
_STEP = 256
"""Inputs that a warp takes at a time."""
_SLOT = 4608
"""Bytes of 16 outputs' values and positions of a step."""
_SUMMED = 256
"""Threads of a block that adds up parts."""
_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)


class Tiling(NamedTuple):
    """How a product is divided; `linear24.cu` says what the macros mean."""

    NT: int
    """Tiles of 8 rows of x."""
    XR: int
    """Rows of a tile that are kept in shared memory: 2, 4 or 8."""
    WM: int
    """Tiles of 16 outputs that a warp has at a time."""
    WO: int
    """Warps of a block that have different outputs."""
    WK: int
    """Warps of a block that have different inputs."""
    U: int
    """Steps of a warp whose weights are on their way."""
    parts: int
    """Of the inputs, each with its blocks."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.WO * self.WK

    def macros(self, inputs: int) -> dict[str, int]:
        """What the kernel is compiled for, besides the dtype."""
        given = self._asdict()
        del given["parts"]
        return {**given, "TAIL": int(inputs % _STEP != 0)}

    def steps(self, inputs: int) -> int:
        """Of a part."""
        return _up(_up(inputs, _STEP), self.parts)

    def shared_memory(self, inputs: int) -> int:
        """Bytes of a block: x, sums of warps, weights."""
        sums = 0 if self.WK == 1 else self.WO * self.WK * self.WM * self.NT * 512
        return self.steps(inputs) * self.NT * self.XR * 512 + sums + self.WO * self.WK * self.U * self.WM * _SLOT

    def blocks(self, outputs: int, multiprocessors: int) -> tuple[int, int]:
        """Along the outputs, which they take in turn, and along the inputs: one for each multiprocessor at most."""
        tiles = _up(outputs, 16 * self.WM * self.WO)
        return min(tiles, max(1, multiprocessors // self.parts)), self.parts

    def cost(self, rows: int, outputs: int, inputs: int, multiprocessors: int) -> float:
        """About the time, in the bytes that a multiprocessor reads in it.

        An H200 measured what is added to the weights themselves: 14 kB (half a microsecond) for each tile of outputs of
        a block and for each eight loads of x in turn, 40 kB for a second kernel that adds up parts.
        """
        each = self.steps(inputs)
        along, parts = self.blocks(outputs, multiprocessors)
        turns = _up(_up(outputs, 16 * self.WM * self.WO), along)
        bytes_read = float(turns * _up(each, self.WK) * self.WK * self.WO * self.WM * _SLOT)
        bytes_read *= max(1.0, 80e3 / (self.WO * self.WK * self.U * self.WM * _SLOT)) ** 0.5  # too few on their way
        bytes_read *= max(1.0, (2 * _SLOT + 4096 * self.NT / self.WM) / 19e3)  # shared memory is the limit
        fill = _up(rows * each, 8 * self.WO * self.WK)
        adding = 0.0 if parts == 1 else 40e3 + 8 * parts * rows * outputs / multiprocessors
        return bytes_read + 14e3 * (turns + fill) + adding


def choose(rows: int, outputs: int, inputs: int, multiprocessors: int, shared_memory: int) -> Tiling | None:
    """The tiling of the least cost, or None where none fits.

    Args:
        rows: rows of x, 1 and more.
        outputs: outputs of the weight.
        inputs: a multiple of `UNIT`.
        multiprocessors: of the GPU.
        shared_memory: bytes that a block may have.
    """
    tilings = ranked(rows, outputs, inputs, multiprocessors, shared_memory)
    return tilings[0] if tilings else None


def ranked(rows: int, outputs: int, inputs: int, multiprocessors: int, shared_memory: int) -> list[Tiling]:
    """All that fit, the cheapest first; of equal ones that with more warps.

    They are the same for 1 and 2 rows, 3 and 4, and then for each eight, so that little has to be compiled.
    """
    tiles, held = _up(rows, 8), 2 if rows <= 2 else 4 if rows <= 4 else 8
    rows = tiles * held
    found = []
    for parts, wm, wo, wk in product(_PARTS, (1,) if tiles <= 2 else (1, 2), (1, 2, 4), range(1, 17)):
        least = Tiling(tiles, held, wm, wo, wk, 1, parts)
        if parts > _up(inputs, _STEP) or wk > least.steps(inputs) or wo * wk > 16:
            continue
        room = shared_memory - least.shared_memory(inputs)
        if room >= 0:
            more = min(3, room // (wo * wk * wm * _SLOT), 160_000 // (wo * wk * wm * _SLOT) - 1)
            tiling = least._replace(U=1 + max(0, more))
            found.append((tiling.cost(rows, outputs, inputs, multiprocessors), -tiling.threads, tiling))
    return [tiling for _, _, tiling in sorted(found)]


class Plan:
    """A product of one shape and number of rows on one device."""

    def __init__(self, tiling: Tiling, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: int) -> None:
        """Compile and load what is missing.

        Raises:
            OSError: NVRTC or the driver is not there.
            RuntimeError: the kernel cannot be compiled or loaded.
        """
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        macros = (*tiling.macros(inputs).items(), *([("HALF", 1)] if dtype == torch.float16 else []))
        module = _module(macros, device)
        grid, memory = tiling.blocks(outputs, processors), tiling.shared_memory(inputs)
        self.multiply = Launch(module, "linear24", grid, tiling.threads, memory, 6, (rows, outputs, inputs))
        self.adds: Launch | None = None
        if tiling.parts > 1:
            count = rows * outputs
            adders = (_up(count, _SUMMED * (1 if outputs % 4 else 4)), 1)
            self.adds = Launch(module, "sum24", adders, _SUMMED, 0, 3, (count, outputs, tiling.parts))
        self.size, self.device = tiling.parts * rows * outputs, device

    def __call__(self, x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """Write the product into `y`, on the current stream."""
        if self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(x, values, positions, bias, y)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        x, values, positions = whole_words(x), whole_words(values), whole_words(positions)
        bias = None if bias is None else bias.contiguous()
        added, to = 0 if bias is None else bias.data_ptr(), y.data_ptr()
        given = (values.data_ptr(), positions.data_ptr(), x.data_ptr(), added, to)
        if self.adds is None:
            self.multiply(stream, *given, 0)
        else:
            parts = x.new_empty(self.size, dtype=torch.float32)
            self.multiply(stream, *given, parts.data_ptr())
            self.adds(stream, parts.data_ptr(), added, to)
        return None


def mma24(x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor | None:
    """`linear24` of checked inputs on a GPU, or None where another kernel has to do it.

    Args:
        x: (..., in).
        values: (out, in/2).
        positions: (out, in/8).
        bias: (out,).

    Returns:
        (..., out).

    Raises:
        RuntimeError: the driver refuses a launch.
    """
    size, outputs, inputs = x.numel(), values.shape[0], x.shape[-1]
    if inputs % UNIT or not 0 < size <= MOST_ROWS * inputs:
        return None
    key = (size // inputs, outputs, inputs, x.dtype, x.get_device())
    if key not in _PLANS:
        _PLANS[key] = _plan(*key)
    plan = _PLANS[key]
    if plan is None:
        return None
    y = x.new_empty((*x.shape[:-1], outputs))
    plan(x, values, positions, bias, y)
    return y


_PLANS: dict[tuple[int, int, int, torch.dtype, int], Plan | None] = {}


def _plan(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: int) -> Plan | None:
    if not outputs or dtype not in (torch.bfloat16, torch.float16) or torch.version.cuda is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return None
    try:
        memory = most_shared_memory(device)
        tiling = choose(rows, outputs, inputs, properties.multi_processor_count, memory)
        return None if tiling is None else Plan(tiling, rows, outputs, inputs, dtype, device)
    except (OSError, RuntimeError) as error:
        _warn(str(error).splitlines()[0] if str(error) else type(error).__name__)
        return None


@cache
def _warn(reason: str) -> None:
    _LOGGER.warning(
        "linear24: the kernel for NVIDIA's sparse tensor cores is not available (%s); from 2 to %d rows are multiplied "
        "by a slower one",
        reason,
        MOST_ROWS,
    )


@cache
def _module(macros: tuple[tuple[str, int], ...], device: int) -> Module:
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"-D{name}={value}" for name, value in macros]
    if nvrtc_version() >= (12, 5):
        options.append("-DORDERED")
    source = Path(__file__).with_name("linear24.cu").read_text()
    return Module(compile_cubin(source, f"sm_{major}{minor}", options), device)


def _up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
