"""Product with a packed 2:4 weight on NVIDIA and AMD GPUs, in Triton.

Up to `FEW_ROWS` rows of x, bytes take the time. Each program multiplies the packed weights of some outputs directly,
and picks from each four inputs the two that the positions name. For more rows a tile of the weight is unpacked in
registers for the tensor cores. From `MANY_ROWS` on, arithmetic takes the time. The weight is unpacked into a
temporary, which costs as much as reading it a few times, and the vendor's dense product is taken.

Tiles come from a table. Autotuning would run on a user's first requests, is not allowed while a graph is captured, and
would make rounding depend on the GPU's other load. `benchmarks/tiles.py` measures the tiles.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sparseforge_ds.extras.packed24 import alignment, triton_programs
from sparseforge_ds.extras.packed24.alignment import aligned
from sparseforge_ds.packed_format.packed_values import GRIDS, PAIRS, dense_inputs

FEW_ROWS = 4
"""Maximum of rows for which the packed weight is multiplied directly."""
MANY_ROWS = 128
"""Maximum of rows for which no dense copy of the weight is made."""
FEW_ROWS_OF_EXPERTS = 64
"""Maximum of rows of a mixture that are each multiplied with their expert's packed weight directly."""
_SUMS_AT_ONCE = 512
"""Sums of parts that one program adds up."""
_CHOOSES_BYTES = torch.version.hip is None and not triton.knobs.runtime.interpret
"""True on NVIDIA's GPUs, whose instruction `prmt` picks any four of eight bytes."""


class Tile(NamedTuple):
    """Work of one program: rows of x, outputs, and groups of four inputs at a time."""

    rows: int
    outputs: int
    groups: int
    num_warps: int
    num_stages: int
    splits: int = 1
    """Programs that share the inputs, and each write a part of the sum."""

    @property
    def few(self) -> bool:
        """True for the matrix-vector kernel; a tensor core takes no fewer than 16 rows."""
        return self.rows < 16


class ValueGrid(NamedTuple):
    """Values of a weight, as a kernel is compiled for them."""

    name: str | None = None
    """A key of `GRIDS` for rounded values."""
    groups_per_scale: int | None = None
    """Groups of four inputs that share a scale of int4; None for one scale a row, or none."""


UNPACKING = Tile(0, 1, 512, 4, 1)
"""Tile of `unpack`."""


def choose_tile(rows: int, dtype: torch.dtype, outputs: int, groups: int) -> Tile:
    """Return the tile of a product with `rows` rows of x in `dtype`; up to `FEW_ROWS` it is a matrix-vector one."""
    if rows <= FEW_ROWS:
        block = triton.next_power_of_2(rows)
        return Tile(block, 4, 512, 4, 1) if dtype == torch.float32 else Tile(block, 1 if rows == 1 else 4, 128, 1, 2)
    if dtype == torch.float32:
        return Tile(16 if rows <= 16 else 32, 64, 8, 4, 2)
    block = min(128, max(16, triton.next_power_of_2(rows)))
    # Few tiles leave multiprocessors idle: then programs share the inputs.
    tiles = triton.cdiv(rows, block) * triton.cdiv(outputs, 64)
    splits = 1
    while splits < 8 and tiles * splits < 600 and groups // (2 * splits) >= 256:
        splits *= 2
    return Tile(block, 64, 16, 4, 3, splits)


def triton24(x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """Compute `linear24` of checked inputs in fp32, fp16 or bf16, with sums in fp32.

    Args:
        x: (..., in).
        values: (out, in/2), of int4 (out, in/4).
        positions: (out, ceil(in/8)).
        bias: (out,).
        scale: (out, 1) of 8-bit values, (out, groups) of int4.

    Returns:
        (..., out).
    """
    outputs = values.shape[0]
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    if rows > MANY_ROWS:
        return torch.nn.functional.linear(x, unpack(values, positions, scale=scale, dtype=x.dtype), bias)
    y = x.new_empty(*x.shape[:-1], outputs)
    if y.numel():
        tile = choose_tile(rows, x.dtype, outputs, inputs // 4)
        multiply(x.reshape(rows, inputs), values, positions, bias, y, tile, scale)
    return y


def multiply(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    y: Tensor,
    tile: Tile,
    scale: Tensor | None = None,
) -> None:
    """Write the product with `tile` into `y`; x is (rows, in)."""
    rows = x.shape[0]
    outputs = values.shape[0]
    groups = x.shape[1] // 4
    value_grid, values, scale = _bytes(values, scale, groups)
    is_scaled_later = scale is not None and value_grid.groups_per_scale is None
    x = aligned(x)
    values = aligned(values)
    positions = positions.contiguous()
    output_tiles = triton.cdiv(outputs, tile.outputs)
    # A kernel without scales or bias does not read their pointers.
    scale_or_any = y if scale is None else scale
    bias_or_any = y if bias is None else bias.contiguous()
    compiled = constants(tile, bias is not None and tile.splits == 1, _word_width(positions, groups), value_grid)
    with _on_device(x):
        if tile.few:
            triton_programs.few_rows[(output_tiles,)](
                *(x, values, positions, scale_or_any, bias_or_any, y, y),
                *(0, rows, outputs, groups),
                HAS_EXPERTS=False,
                **compiled,
                **_options(tile),
            )
            return
        # Programs that share the inputs write parts, which another kernel adds up.
        sums = y if tile.splits == 1 else x.new_empty(tile.splits, rows, outputs, dtype=torch.float32)
        triton_programs.many_rows[(triton.cdiv(rows, tile.rows), output_tiles, tile.splits)](
            *(x, values, positions, scale_or_any, bias_or_any, sums, y),
            *(rows, outputs, groups, _groups_of_split(tile, groups)),
            HAS_SCALE=is_scaled_later and tile.splits == 1,
            HAS_EXPERTS=False,
            **compiled,
            **_options(tile),
        )
        if tile.splits > 1:
            count = rows * outputs
            triton_programs.add_parts[(triton.cdiv(count, _SUMS_AT_ONCE),)](
                *(sums, scale_or_any, bias_or_any, y, tile.splits, count, outputs),
                HAS_SCALE=is_scaled_later,
                HAS_BIAS=bias is not None,
                SIZE=_SUMS_AT_ONCE,
            )


def unpack(
    values: Tensor,
    positions: Tensor,
    tile: Tile = UNPACKING,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Unpack values, positions and scales into the dense weight (out, in), of rounded values in `dtype`."""
    outputs = values.shape[0]
    groups = dense_inputs(values) // 4
    dense = values.new_empty(outputs, 4 * groups, dtype=values.dtype if scale is None else dtype)
    value_grid, values, scale = _bytes(values, scale, groups)
    values = aligned(values)
    positions = positions.contiguous()
    scale_or_any = dense if scale is None else scale
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(groups, tile.groups))
    compiled = {"EVEN": _word_width(positions, groups), "OUTPUTS": tile.outputs, "GROUPS": tile.groups}
    with _on_device(values):
        triton_programs.unpack[grid](
            *(values, positions, scale_or_any, dense, outputs, groups),
            GRID=value_grid.name,
            PER_SCALE=value_grid.groups_per_scale,
            **compiled,
            **_options(tile),
        )
    return dense


def triton_experts24(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute `experts24` of checked inputs in one launch for all experts, without waiting on the host.

    Args:
        x: (rows, in), sorted by expert.
        values: (experts, out, in/2), of int4 (experts, out, in/4).
        positions: (experts, out, ceil(in/8)).
        ends: (experts,) index behind the last row of each expert.
        scale: (experts, out, 1) of 8-bit values, (experts, out, groups) of int4.

    Returns:
        (rows, out); rows from the last end on are zero.
    """
    count, outputs = values.shape[:2]
    rows, inputs = x.shape
    y = x.new_zeros(rows, outputs)
    if not y.numel():
        return y
    # A tile for the mean number of rows of an expert.
    groups = inputs // 4
    by_row = rows <= FEW_ROWS_OF_EXPERTS
    tile = choose_tile(1 if by_row else max(rows // count, FEW_ROWS + 1), x.dtype, outputs, groups)._replace(splits=1)
    output_tiles = triton.cdiv(outputs, tile.outputs)
    value_grid, values, scale = _bytes(values, scale, groups)
    positions = positions.contiguous()
    scale_or_any = y if scale is None else scale
    tensors = (aligned(x), aligned(values), positions, scale_or_any, y, y)
    compiled = {**constants(tile, False, _word_width(positions, groups), value_grid), **_options(tile)}
    with _on_device(x):
        if by_row:
            # A program for every row and tile of outputs.
            numbers = torch.arange(rows, device=x.device, dtype=ends.dtype)
            experts = torch.searchsorted(ends, numbers, right=True)
            triton_programs.few_rows[(output_tiles, rows)](
                *tensors, experts, count, 1, outputs, groups, HAS_EXPERTS=True, **compiled
            )
        else:
            # A program for every run of rows and tile of outputs.
            runs = divide_rows(ends, rows, tile.rows)
            triton_programs.many_rows[(runs.shape[0], output_tiles, 1)](
                *(*tensors, runs, rows, outputs, groups, groups),
                HAS_SCALE=scale is not None and value_grid.groups_per_scale is None,
                HAS_EXPERTS=True,
                **compiled,
            )
    return y


def divide_rows(ends: Tensor, rows: int, limit: int) -> Tensor:
    """Divide the rows of a mixture into runs that one program can multiply, each of one expert.

    Args:
        ends: (experts,) index behind the last row of each expert.
        rows: rows of x.
        limit: maximum of rows in a run.

    Returns:
        (runs, 3) expert, first row and end of each run. There are as many runs as `rows` can ever need; superfluous
        ones are empty: they begin at or behind their end.
    """
    ends = ends.clamp(0, rows)  # no program leaves the rows, whatever `ends` holds
    starts = torch.nn.functional.pad(ends, (1, -1))
    run_counts = (ends - starts + limit - 1) // limit
    run_ends = run_counts.cumsum(0)
    run = torch.arange(min(rows, rows // limit + len(ends)), device=ends.device)
    expert = torch.searchsorted(run_ends, run, right=True).clamp(max=len(ends) - 1)
    first = (starts[expert] + (run - (run_ends - run_counts)[expert]) * limit).clamp(min=0)
    return torch.stack((expert, first, ends[expert]), 1)


def constants(
    tile: Tile, has_bias: bool, word_width: int, grid: ValueGrid, chooses_bytes: bool = _CHOOSES_BYTES
) -> dict[str, Any]:
    """Return the constants that a kernel of products is compiled for."""
    sizes = {"HAS_BIAS": has_bias, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "GROUPS": tile.groups}
    paths = {"EVEN": word_width, "PRMT": chooses_bytes, "GRID": grid.name, "PER_SCALE": grid.groups_per_scale}
    return {**sizes, **paths, **({"AHEAD": tile.num_stages} if tile.few else {})}


def _bytes(values: Tensor, scale: Tensor | None, groups: int) -> tuple[ValueGrid, Tensor, Tensor | None]:
    """Return the grid of values, and values and scales as kernels read them; not every GPU has types for all of them.

    Args:
        values: of a weight, or of several.
        scale: their scales, or None.
        groups: groups of four inputs in a row.

    Returns:
        The grid; values without scales as they are, others as int8; scales in bf16 as int16.
    """
    if scale is None:
        return ValueGrid(), values, None
    name = next(name for name, dtype in GRIDS.items() if dtype == values.dtype)
    groups_per_scale = groups // scale.shape[-1] if scale.shape[-1] > 1 else None
    scale = scale.contiguous()
    scale = scale.view(torch.int16) if values.dtype == PAIRS else scale
    return ValueGrid(name, groups_per_scale), values.view(torch.int8), scale


def _groups_of_split(tile: Tile, groups: int) -> int:
    """Return the groups of one part of the sum."""
    return int(triton.cdiv(triton.cdiv(groups, tile.groups), tile.splits) * tile.groups)


def _options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's device the current one; torch's own context costs microseconds even without a change."""
    index = tensor.get_device()
    return nullcontext() if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def _word_width(positions: Tensor, groups: int) -> int:
    """Return how many 16-bit words of a row's positions, of four groups each, may be read at once: 4, 1, or 0."""
    return 0 if groups % 4 or not alignment.begins_at(positions, 8) else 1 if groups % 16 else 4
