"""Product of few rows with a packed 2:4 weight on NVIDIA's sparse tensor cores, from compute capability 8.0 on.

Their instruction (`mma.sp`) takes kept values and positions as `pack24` stores them. Nothing is unpacked, and the time
is that of reading the packed weight. The kernel is `linear24.cu`; for 33 to 256 rows there is `staged24.cu`, where it
is asked for. NVRTC compiles them in some tenths of a second when a process first needs a tiling. Other products go to
`triton_kernel`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sparseforge_ds.extras.packed24.alignment import aligned
from sparseforge_ds.extras.packed24.cuda_driver import (
    Launch,
    LaunchShape,
    Module,
    compile_cubin,
    nvrtc_version,
    shared_memory_limit,
)
from sparseforge_ds.extras.packed24.staged_tiling import STAGED_ROWS, StagedTiling, ranked_staged
from sparseforge_ds.packed_format.packed_values import PAIRS, values_per_element

_LOGGER = logging.getLogger(__name__)

MOST_ROWS = 32
"""Maximum of rows of x. On an H200 the kernel beats the dense product up to 16 rows and equals it at 32, where
Triton's kernel is half as fast."""
UNIT = 64
"""Divisor of the number of inputs."""
_STEP = 256
"""Inputs that a warp takes at a time."""
MACROS = {torch.int8: ("INT8", 1), torch.float8_e4m3fn: ("FP8", 1), PAIRS: ("INT4", 1)}
"""Macros of the kernel by the dtype of rounded values."""
SLOT = 4608
"""Bytes of 16-bit values and their positions of 16 outputs in a step."""
_SUM_THREADS = 256
"""Threads per block that adds up parts."""
_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""Numbers of parts to try."""


class Stored(NamedTuple):
    """Rounded values of a weight, as a kernel is compiled for them."""

    dtype: torch.dtype | None = None
    """Dtype of rounded values, None for values in that of x."""
    blocks_per_scale: int | None = 0
    """Blocks of `UNIT` inputs that share a scale of int4; 0 for one scale a row, or none. None: the kernel does not
    take these groups."""

    def macros(self) -> tuple[tuple[str, int], ...]:
        """Return the macros of the kernel."""
        if self.dtype is None:
            return ()
        grouped = (("PER_SCALE", self.blocks_per_scale),) if self.blocks_per_scale else ()
        return (MACROS[self.dtype], *grouped)

    def slot_bytes(self) -> int:
        """Return the bytes of values, positions and scales of 16 outputs in a step."""
        values = 4096 if self.dtype is None else 2048 // values_per_element(self.dtype)
        return values + 512 + (256 if self.blocks_per_scale else 0)


AS_X = Stored()
"""Values in the dtype of x."""


class Tiling(NamedTuple):
    """Division of a product among blocks and warps; `linear24.cu` explains the macros."""

    NT: int
    """Tiles of 8 rows of x."""
    XR: int
    """Rows of a tile in shared memory: 2, 4 or 8."""
    WM: int
    """Tiles of 16 outputs that a warp computes at a time."""
    WO: int
    """Warps of a block with different outputs."""
    WK: int
    """Warps of a block with different inputs."""
    U: int
    """Steps of a warp whose weights are being loaded."""
    parts: int
    """Parts of the inputs, each with its own blocks."""

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "linear24"

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.WO * self.WK

    def macros(self, inputs: int) -> dict[str, int]:
        """Return the macros of the kernel, without that of the dtype."""
        fields = self._asdict()
        del fields["parts"]
        return {**fields, "TAIL": int(inputs % _STEP != 0)}

    def steps(self, inputs: int) -> int:
        """Return the steps of a part."""
        return _divide_up(_divide_up(inputs, _STEP), self.parts)

    def shared_memory(self, inputs: int, slot: int = SLOT) -> int:
        """Return the bytes of shared memory per block: x, sums of warps, weights."""
        sums = 0 if self.WK == 1 else self.WO * self.WK * self.WM * self.NT * 512
        weights = self.WO * self.WK * self.U * self.WM * slot
        return self.steps(inputs) * self.NT * self.XR * 512 + sums + weights

    def blocks(self, outputs: int, multiprocessors: int) -> tuple[int, int]:
        """Return the blocks along the outputs, which take turns, and along the inputs; at most one a multiprocessor."""
        tiles = _divide_up(outputs, 16 * self.WM * self.WO)
        return min(tiles, max(1, multiprocessors // self.parts)), self.parts

    def cost(self, rows: int, outputs: int, inputs: int, multiprocessors: int, slot: int = SLOT) -> float:
        """Estimate the time, as the bytes that a multiprocessor reads in it.

        Measured on an H200, in addition to the weights: 14 kB (half a microsecond) for each tile of outputs of a block
        and for each eight loads of x in turn, 40 kB for the second kernel that adds up parts.
        """
        steps = self.steps(inputs)
        along, parts = self.blocks(outputs, multiprocessors)
        turns = _divide_up(_divide_up(outputs, 16 * self.WM * self.WO), along)
        bytes_read = float(turns * _divide_up(steps, self.WK) * self.WK * self.WO * self.WM * slot)
        # Too few bytes in flight do not fill the memory's latency.
        bytes_read *= max(1.0, 80e3 / (self.WO * self.WK * self.U * self.WM * slot)) ** 0.5
        # With many rows, shared memory is the limit.
        bytes_read *= max(1.0, (2 * slot + 4096 * self.NT / self.WM) / 19e3)
        fill = _divide_up(rows * steps, 8 * self.WO * self.WK)
        adding = 0.0 if parts == 1 else 40e3 + 8 * parts * rows * outputs / multiprocessors
        return bytes_read + 14e3 * (turns + fill) + adding


def choose_tiling(
    rows: int, outputs: int, inputs: int, multiprocessors: int, shared_memory: int, slot: int = SLOT
) -> Tiling | StagedTiling | None:
    """Return the tiling with the least cost, or None if none fits.

    Args:
        rows: rows of x, at least 1.
        outputs: outputs of the weight.
        inputs: its inputs, a multiple of `UNIT`.
        multiprocessors: multiprocessors of the GPU.
        shared_memory: bytes that a block may have.
        slot: `slot_bytes` of the weight.
    """
    tilings = ranked(rows, outputs, inputs, multiprocessors, shared_memory, slot)
    return tilings[0] if tilings else None


def ranked(
    rows: int, outputs: int, inputs: int, multiprocessors: int, shared_memory: int, slot: int = SLOT
) -> Sequence[Tiling | StagedTiling]:
    """Return all tilings that fit, the cheapest first, and at equal cost the one with more warps.

    They are the same for 1 and 2 rows, for 3 and 4, and then for each eight, so that few are compiled. For more than
    `MOST_ROWS` rows they are those of `ranked_staged`.
    """
    if rows > MOST_ROWS:
        return ranked_staged(rows, outputs, inputs, multiprocessors, shared_memory, slot)
    # Rounded rows give equal tilings.
    tiles = _divide_up(rows, 8)
    tile_rows = 2 if rows <= 2 else 4 if rows <= 4 else 8
    rows = tiles * tile_rows
    costs = []
    for parts, wm, wo, wk in product(_PARTS, (1,) if tiles <= 2 else (1, 2), (1, 2, 4), range(1, 17)):
        smallest = Tiling(tiles, tile_rows, wm, wo, wk, 1, parts)
        if parts > _divide_up(inputs, _STEP) or wk > smallest.steps(inputs) or wo * wk > 16:
            continue
        # As many steps in flight as shared memory has room for.
        room = shared_memory - smallest.shared_memory(inputs, slot)
        if room >= 0:
            more = min(3, room // (wo * wk * wm * slot), 160_000 // (wo * wk * wm * slot) - 1)
            tiling = smallest._replace(U=1 + max(0, more))
            costs.append((tiling.cost(rows, outputs, inputs, multiprocessors, slot), -tiling.threads, tiling))
    return [tiling for _, _, tiling in sorted(costs)]


class ProductPlan:
    """Kernels of one shape and number of rows on one device, compiled and loaded."""

    def __init__(
        self,
        tiling: Tiling | StagedTiling,
        rows: int,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: int,
        stored: Stored = AS_X,
    ) -> None:
        """Compile and load kernels that the process does not have yet.

        Args:
            tiling: division of the product.
            rows: rows of x.
            outputs: outputs of the weight.
            inputs: its inputs.
            dtype: dtype of x.
            device: index of the GPU.
            stored: form of the values.

        Raises:
            OSError: NVRTC or the driver is missing.
            RuntimeError: the kernel cannot be compiled or loaded.
        """
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        macros = (*tiling.macros(inputs).items(), *([("HALF", 1)] if dtype == torch.float16 else []))
        macros += stored.macros()
        overlaps = may_overlap(torch.cuda.get_device_capability(device))
        macros += (("OVERLAP", 1),) if overlaps else ()
        module = load_module(macros, device)
        shape = LaunchShape(
            tiling.blocks(outputs, processors),
            tiling.threads,
            tiling.shared_memory(inputs, stored.slot_bytes()),
        )
        self.multiply = Launch(module, tiling.kernel, shape, 7, (rows, outputs, inputs), overlaps)
        # Parts of the inputs are added by a second kernel.
        self.add: Launch | None = None
        if tiling.parts > 1:
            count = rows * outputs
            blocks = (_divide_up(count, _SUM_THREADS * (1 if outputs % 4 else 4)), 1)
            shape = LaunchShape(blocks, _SUM_THREADS)
            self.add = Launch(module, "sum24", shape, 4, (count, outputs, tiling.parts), overlaps)
        self.size = tiling.parts * rows * outputs
        self.device = device

    def __call__(
        self,
        x: Tensor,
        values: Tensor,
        positions: Tensor,
        bias: Tensor | None,
        y: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        """Write the product into `y`, on the current stream."""
        if self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(x, values, positions, bias, y, scale)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        # Copies must live until the launch.
        x = aligned(x)
        weights = (values, positions, scale)
        values = aligned(values)
        positions = aligned(positions)
        bias = None if bias is None else bias.contiguous()
        scale = None if scale is None else aligned(scale)
        in_order = any(copy is not weight for copy, weight in zip((values, positions, scale), weights, strict=True))
        # Both kernels end with scales, bias and y.
        bias_pointer = 0 if bias is None else bias.data_ptr()
        scale_pointer = 0 if scale is None else scale.data_ptr()
        ending = (scale_pointer, bias_pointer, y.data_ptr())
        pointers = (values.data_ptr(), positions.data_ptr(), x.data_ptr(), *ending)
        if self.add is None:
            self.multiply(stream, *pointers, 0, in_order=in_order)
        else:
            parts = x.new_empty(self.size, dtype=torch.float32)
            self.multiply(stream, *pointers, parts.data_ptr(), in_order=in_order)
            self.add(stream, parts.data_ptr(), *ending)
        return None


def may_overlap(capability: tuple[int, int]) -> bool:
    """Return True if a kernel may read weights before the kernel ahead of it has ended (programmatic launches).

    It is tried by SPARSEFORGE_OVERLAP=1, from compute capability 9.0 on. A weight must not be written by the kernel
    ahead of its product, nor by one before that where kernels between are launched so, too.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return _is_asked_for("SPARSEFORGE_OVERLAP") and capability >= (9, 0)


def stages_rows() -> bool:
    """Return True if products of more than `MOST_ROWS` rows, up to `STAGED_ROWS`, are tried: SPARSEFORGE_STAGED=1."""
    return _is_asked_for("SPARSEFORGE_STAGED")


def _is_asked_for(variable: str) -> bool:
    """Return True if a variable of the environment is 1, False if it is 0, empty or not set."""
    setting = os.environ.get(variable, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{variable}={setting!r} is neither 0 nor 1: set it to 1, or unset it")
    return setting == "1"


def mma24(
    x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, scale: Tensor | None = None
) -> Tensor | None:
    """Compute `linear24` of checked inputs on a GPU, or return None if another kernel must.

    Args:
        x: (..., in).
        values: (out, in/2), of int4 (out, in/4).
        positions: (out, in/8).
        bias: (out,).
        scale: (out, 1) of 8-bit values, (out, groups) of int4.

    Returns:
        (..., out).

    Raises:
        RuntimeError: the driver refuses a launch.
        ValueError: SPARSEFORGE_STAGED or SPARSEFORGE_OVERLAP is neither 0 nor 1.
    """
    size = x.numel()
    outputs = values.shape[0]
    inputs = x.shape[-1]
    if inputs % UNIT or not 0 < size <= STAGED_ROWS * inputs or (size > MOST_ROWS * inputs and not stages_rows()):
        return None
    stored = AS_X if scale is None else Stored(values.dtype)
    if scale is not None and (groups := scale.shape[-1]) > 1:
        # A block has one scale, and two are loaded.
        fits = not inputs % (groups * UNIT) and not scale.numel() % 2
        stored = Stored(values.dtype, inputs // groups // UNIT if fits else None)
    plan = plan_product(size // inputs, outputs, inputs, x.dtype, x.get_device(), stored)
    if plan is None:
        return None
    y = x.new_empty((*x.shape[:-1], outputs))
    plan(x, values, positions, bias, y, scale)
    return y


@cache
def plan_product(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: int, stored: Stored = AS_X
) -> ProductPlan | None:
    """Plan a product once a process, or return None, after a warning if the GPU should have the kernel."""
    if not outputs or dtype not in (torch.bfloat16, torch.float16) or torch.version.cuda is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return None
    if stored.blocks_per_scale is None:
        note_groups()
        return None
    try:
        memory = shared_memory_limit(device)
        processors = properties.multi_processor_count
        tiling = choose_tiling(rows, outputs, inputs, processors, memory, stored.slot_bytes())
        return None if tiling is None else ProductPlan(tiling, rows, outputs, inputs, dtype, device, stored)
    except (OSError, RuntimeError) as error:
        _warn(str(error).splitlines()[0] if str(error) else type(error).__name__)
        return None


@cache
def _warn(reason: str) -> None:
    _LOGGER.warning(
        "linear24: the kernel for NVIDIA's sparse tensor cores is not available (%s); a slower one multiplies 2 to %d "
        "rows",
        reason,
        STAGED_ROWS if stages_rows() else MOST_ROWS,
    )


@cache
def note_groups() -> None:
    """Say once that weights have groups which this kernel does not multiply."""
    _LOGGER.warning(
        "linear24: a weight's groups of int4 go to Triton's kernel, which is slower for 2 to %d rows. That for sparse "
        "tensor cores takes groups of a multiple of %d values, of which a weight has an even number: export with "
        "another --group_size, such as 64",
        MOST_ROWS,
        UNIT // 2,
    )


@cache
def load_module(macros: tuple[tuple[str, int], ...], device: int) -> Module:
    """Compile and load a kernel, once a process for the same macros."""
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"-D{name}={value}" for name, value in macros]
    if nvrtc_version() >= (12, 5):
        options.append("-DORDERED")
    return Module(compile_cubin(read_source("STAGES" in dict(macros)), f"sm_{major}{minor}", options), device)


def read_source(is_staged: bool) -> str:
    """Return the source of `linear24`, or of `staged24`, each with `sum24`."""
    names = ("linear24.cu", "staged24.cu") if is_staged else ("linear24.cu",)
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


def _divide_up(a: int, b: int) -> int:
    """Divide, and round up."""
    return -(-a // b)
