"""The product with a packed 2:4 weight on NVIDIA and AMD GPUs, in Triton.

Up to `FEW_ROWS` rows of x, time is bytes: each program multiplies some outputs' packed weights as they lie in memory,
and picks from each four inputs the two that its positions name. For more rows a tile of the weight is unpacked in
registers and goes to the tensor cores. From `MANY_ROWS` on, where time is arithmetic, the weight is unpacked into a
temporary, which costs as much as reading it a few times, and the vendor's dense product is taken.

Tiles come from a table and not from autotuning, which would run on a user's first requests, is not allowed while a
graph is captured, and would make rounding depend on what else ran on the GPU. `benchmarks/tiles.py` measures them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sparseforge_ds.extras.packed24 import alignment, triton_programs
from sparseforge_ds.extras.packed24.alignment import whole_words

FEW_ROWS = 4
"""Up to here the packed weight is multiplied as it lies."""
MANY_ROWS = 128
"""Behind here a dense copy of the weight is multiplied."""
FEW_ROWS_OF_EXPERTS = 64
"""Up to here each row of a mixture is multiplied with its expert's packed weight as it lies."""
_ADDED = 512
"""Sums of parts that one program adds up."""
_CHOOSES_BYTES = torch.version.hip is None and not triton.knobs.runtime.interpret
"""NVIDIA's `prmt` picks any four of eight bytes at once."""


class Tile(NamedTuple):
    """What one program does: outputs and, of the inputs at a time, groups of four; rows of x."""

    rows: int
    outputs: int
    groups: int
    num_warps: int
    num_stages: int
    splits: int = 1
    """Of the inputs, among programs that each write a part of the sum."""

    @property
    def few(self) -> bool:
        """Whether it is of the matrix-vector kernel: a tensor core takes no fewer than 16 rows."""
        return self.rows < 16


UNPACKING = Tile(0, 1, 512, 4, 1)
"""The tile of `unpack`."""


def choose_tile(rows: int, dtype: torch.dtype, outputs: int, groups: int) -> Tile:
    """The tile of a product with `rows` rows of x in `dtype`; it is a matrix-vector one up to `FEW_ROWS`."""
    if rows <= FEW_ROWS:
        block = triton.next_power_of_2(rows)
        return Tile(block, 4, 512, 4, 1) if dtype == torch.float32 else Tile(block, 1 if rows == 1 else 4, 128, 1, 2)
    if dtype == torch.float32:
        return Tile(16 if rows <= 16 else 32, 64, 8, 4, 2)
    block = min(128, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block) * triton.cdiv(outputs, 64)
    splits = 1
    while splits < 8 and tiles * splits < 600 and groups // (2 * splits) >= 256:
        splits *= 2
    return Tile(block, 64, 16, 4, 3, splits)


def triton24(x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor:
    """`linear24` of checked inputs: fp32, fp16 or bf16; sums are in fp32.

    Args:
        x: (..., in).
        values: (out, in/2).
        positions: (out, ceil(in/8)).
        bias: (out,).

    Returns:
        (..., out).
    """
    outputs, inputs = values.shape[0], x.shape[-1]
    rows = x.numel() // inputs
    if rows > MANY_ROWS:
        return torch.nn.functional.linear(x, unpack(values, positions), bias)
    y = x.new_empty(*x.shape[:-1], outputs)
    if y.numel():
        multiply(x.reshape(rows, inputs), values, positions, bias, y, choose_tile(rows, x.dtype, outputs, inputs // 4))
    return y


def multiply(x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, y: Tensor, tile: Tile) -> None:
    """Write the product with `tile` into `y`; x is (rows, in)."""
    rows, outputs, groups = x.shape[0], values.shape[0], x.shape[1] // 4
    parts = triton.cdiv(outputs, tile.outputs)
    x, values, positions = whole_words(x), whole_words(values), positions.contiguous()
    added = y if bias is None else bias  # a pointer that is not read
    how = constants(tile, bias is not None and tile.splits == 1, _even(positions, groups))
    with _on(x):
        if tile.few:
            tensors = (x, values, positions, added, y)
            triton_programs.few_rows[(parts,)](
                *tensors, y, 0, rows, outputs, groups, HAS_EXPERTS=False, **how, **_options(tile)
            )
            return
        to = y if tile.splits == 1 else x.new_empty(tile.splits, rows, outputs, dtype=torch.float32)
        grid, sizes = (triton.cdiv(rows, tile.rows), parts, tile.splits), (rows, outputs, groups, _each(tile, groups))
        triton_programs.many_rows[grid](
            x, values, positions, added, to, y, *sizes, HAS_EXPERTS=False, **how, **_options(tile)
        )
        if tile.splits > 1:
            count = rows * outputs
            adders = (triton.cdiv(count, _ADDED),)
            triton_programs.add_parts[adders](
                to, added, y, tile.splits, count, outputs, HAS_BIAS=bias is not None, SIZE=_ADDED
            )


def unpack(values: Tensor, positions: Tensor, tile: Tile = UNPACKING) -> Tensor:
    """(out, in/2) and positions -> the dense weight, (out, in)."""
    outputs, groups = values.shape[0], values.shape[1] // 2
    values, positions = whole_words(values), positions.contiguous()
    dense = values.new_empty(outputs, 4 * groups)
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(groups, tile.groups))
    how = {"EVEN": _even(positions, groups), "OUTPUTS": tile.outputs, "GROUPS": tile.groups, **_options(tile)}
    with _on(values):
        triton_programs.unpack[grid](values, positions, dense, outputs, groups, **how)
    return dense


def triton_experts24(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    """`experts24` of checked inputs: one launch for all experts, and the host waits for nothing.

    Args:
        x: (rows, in), sorted by expert.
        values: (experts, out, in/2).
        positions: (experts, out, ceil(in/8)).
        ends: (experts,): behind the last row of each expert.

    Returns:
        (rows, out); rows behind the last end are zero.
    """
    count, outputs = values.shape[:2]
    rows, inputs = x.shape
    y = x.new_zeros(rows, outputs)
    if not y.numel():
        return y
    groups = inputs // 4
    few = rows <= FEW_ROWS_OF_EXPERTS
    tile = choose_tile(1 if few else max(rows // count, FEW_ROWS + 1), x.dtype, outputs, groups)._replace(splits=1)
    parts = triton.cdiv(outputs, tile.outputs)
    positions = positions.contiguous()
    tensors = (whole_words(x), whole_words(values), positions, y, y)
    how = {**constants(tile, False, _even(positions, groups)), **_options(tile)}
    with _on(x):
        if few:
            numbers = torch.arange(rows, device=x.device, dtype=ends.dtype)
            experts = torch.searchsorted(ends, numbers, right=True)
            triton_programs.few_rows[(parts, rows)](
                *tensors, experts, count, 1, outputs, groups, HAS_EXPERTS=True, **how
            )
        else:
            runs = divide_rows(ends, rows, tile.rows)
            triton_programs.many_rows[(runs.shape[0], parts, 1)](
                *tensors, runs, rows, outputs, groups, groups, HAS_EXPERTS=True, **how
            )
    return y


def divide_rows(ends: Tensor, rows: int, most: int) -> Tensor:
    """The rows of a mixture in runs that one program can multiply: of one expert, and no longer than `most`.

    Args:
        ends: (experts,): behind the last row of each expert.
        rows: rows of x.
        most: rows of a run.

    Returns:
        (runs, 3): the expert, the first row and the end of each run, as many as `rows` can ever need; those that are
        not needed begin where they end or behind.
    """
    ends = ends.clamp(0, rows)  # whatever they hold, no program leaves the rows
    starts = torch.nn.functional.pad(ends, (1, -1))
    runs_of = (ends - starts + most - 1) // most
    up_to = runs_of.cumsum(0)
    run = torch.arange(min(rows, rows // most + len(ends)), device=ends.device)
    expert = torch.searchsorted(up_to, run, right=True).clamp(max=len(ends) - 1)
    first = (starts[expert] + (run - (up_to - runs_of)[expert]) * most).clamp(min=0)
    return torch.stack((expert, first, ends[expert]), 1)


def constants(tile: Tile, has_bias: bool, even: int, chooses_bytes: bool = _CHOOSES_BYTES) -> dict[str, Any]:
    """What a kernel of products is compiled for."""
    how = {"HAS_BIAS": has_bias, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "GROUPS": tile.groups}
    return how | {"EVEN": even, "PRMT": chooses_bytes} | ({"AHEAD": tile.num_stages} if tile.few else {})


def _each(tile: Tile, groups: int) -> int:
    """Groups of a part of the sum."""
    return int(triton.cdiv(triton.cdiv(groups, tile.groups), tile.splits) * tile.groups)


def _options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Its device as the current one; what torch has for it costs microseconds where nothing is to be done."""
    at = tensor.get_device()
    return nullcontext() if at < 0 or at == torch.cuda.current_device() else torch.cuda.device(at)


def _even(positions: Tensor, groups: int) -> int:
    """Words of 16 bits in which each row's positions come, four groups in one: 4 at a time, 1 at a time, or 0."""
    return 0 if groups % 4 or not alignment.begins_at(positions, 8) else 1 if groups % 16 else 4
