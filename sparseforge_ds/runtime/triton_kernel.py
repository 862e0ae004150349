"""The product with a packed 2:4 weight on NVIDIA and AMD GPUs, in Triton.

Up to `FEW_ROWS` rows of x, time is bytes: each program multiplies some outputs' packed weights as they lie in memory,
and picks from each four inputs the two that its positions name. For more rows a tile of the weight is unpacked in
registers and goes to the tensor cores; nothing dense is ever in memory.

Tiles come from a table and not from autotuning, which would run on a user's first requests, is not allowed while a
graph is captured, and would make rounding depend on what else ran on the GPU. The tables have not been measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 4
"""Up to here the packed weight is multiplied as it lies."""
FEW_ROWS_OF_EXPERTS = 64
"""Up to here each row of a mixture is multiplied with its expert's packed weight as it lies."""


class Tile(NamedTuple):
    """What one program does: outputs and, of the inputs at a time, groups of four; rows of x."""

    rows: int
    outputs: int
    groups: int
    num_warps: int
    num_stages: int


def choose_tile(rows: int, dtype: torch.dtype) -> Tile:
    """The tile of a product with `rows` rows of x in `dtype`; it is a matrix-vector one up to `FEW_ROWS`."""
    if rows <= FEW_ROWS:
        return Tile(triton.next_power_of_2(rows), 8, 64, 4, 3)
    groups = 8 if dtype == torch.float32 else 16
    if rows <= 16:
        return Tile(16, 64, 2 * groups, 4, 3)
    if rows <= 64:
        return Tile(32, 64, groups, 4, 3)
    return Tile(64, 128, groups, 8, 3)


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
    rows_x = x.reshape(-1, inputs).contiguous()
    rows = rows_x.shape[0]
    y = x.new_empty(rows, outputs)
    if y.numel():
        tile = choose_tile(rows, x.dtype)
        parts = triton.cdiv(outputs, tile.outputs)
        tensors = (rows_x, values.contiguous(), positions.contiguous(), y if bias is None else bias, y)
        sizes = (rows, outputs, inputs // 4)
        how = {**constants(tile, bias is not None), "num_warps": tile.num_warps, "num_stages": tile.num_stages}
        with torch.cuda.device_of(x):
            if rows <= FEW_ROWS:
                _few_rows[(parts,)](*tensors, y, 0, *sizes, HAS_EXPERTS=False, **how)
            else:
                _many_rows[(triton.cdiv(rows, tile.rows), parts)](*tensors, y, *sizes, HAS_EXPERTS=False, **how)
    return y.reshape(*x.shape[:-1], outputs)


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
    few = rows <= FEW_ROWS_OF_EXPERTS
    tile = choose_tile(1 if few else max(rows // count, FEW_ROWS + 1), x.dtype)
    parts, groups = triton.cdiv(outputs, tile.outputs), inputs // 4
    tensors = (x.contiguous(), values.contiguous(), positions.contiguous(), y, y)
    how = {**constants(tile, False), "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    with torch.cuda.device_of(x):
        if few:
            numbers = torch.arange(rows, device=x.device, dtype=ends.dtype)
            experts = torch.searchsorted(ends, numbers, right=True)
            _few_rows[(parts, rows)](*tensors, experts, count, 1, outputs, groups, HAS_EXPERTS=True, **how)
        else:
            runs = divide_rows(ends, rows, tile.rows)
            _many_rows[(runs.shape[0], parts)](*tensors, runs, rows, outputs, groups, HAS_EXPERTS=True, **how)
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
    starts = torch.nn.functional.pad(ends, (1, -1))
    runs_of = (ends - starts + most - 1) // most
    up_to = runs_of.cumsum(0)
    run = torch.arange(min(rows, rows // most + len(ends)), device=ends.device)
    expert = torch.searchsorted(up_to, run, right=True).clamp(max=len(ends) - 1)
    first = starts[expert] + (run - (up_to - runs_of)[expert]) * most
    return torch.stack((expert, first, ends[expert]), 1)


def constants(tile: Tile, has_bias: bool) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return {"HAS_BIAS": has_bias, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "GROUPS": tile.groups}


@triton.jit
def _load_packed(values, positions, n, g, outputs, groups, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a tile (OUTPUTS, GROUPS) the two values of each group, and in which of its four places they belong."""
    row = n.to(tl.int64)
    pair = tl.max_contiguous(2 * g + tl.arange(0, 2 * GROUPS), 2 * GROUPS)
    inside = (n < outputs)[:, None] & (pair < 2 * groups)[None, :]
    both = tl.load(values + row[:, None] * (2 * groups) + pair[None, :], mask=inside, other=0.0)
    low_value, high_value = tl.split(tl.reshape(both, (OUTPUTS, GROUPS, 2)))
    at = g // 2 + tl.arange(0, GROUPS // 2)
    stride = (groups + 1) // 2
    inside = (n < outputs)[:, None] & (at < stride)[None, :]
    byte = tl.load(positions + row[:, None] * stride + at[None, :], mask=inside, other=0)
    half = tl.reshape(tl.join(byte & 15, byte >> 4), (OUTPUTS, GROUPS))
    return low_value, high_value, half & 3, half >> 2


@triton.jit
def _few_rows(  # type: ignore[no-untyped-def]
    x,
    values,
    positions,
    bias,
    y,
    experts,
    count,
    rows,
    outputs,
    groups,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
):
    if HAS_EXPERTS:  # one row and its expert's weight; a row of nobody has no outputs
        row = tl.program_id(1).to(tl.int64)
        expert = tl.load(experts + row).to(tl.int64)
        x += row * (4 * groups)
        y += row * outputs
        values += expert * outputs * (2 * groups)
        positions += expert * outputs * ((groups + 1) // 2)
        outputs = tl.where(expert < count, outputs, 0)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, OUTPUTS, GROUPS), dtype=tl.float32)
    for g in range(0, groups, GROUPS):
        low_value, high_value, low, high = _load_packed(values, positions, n, g, outputs, groups, OUTPUTS, GROUPS)
        k = 4 * g + tl.arange(0, 4 * GROUPS)
        inside = (m < rows)[:, None] & (k < 4 * groups)[None, :]
        four = tl.load(x + m[:, None] * (4 * groups) + k[None, :], mask=inside, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(four, (ROWS, GROUPS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        x0, x1, x2, x3 = x0[:, None, :], x1[:, None, :], x2[:, None, :], x3[:, None, :]
        low, high = low[None, :, :], high[None, :, :]
        # the lower of two places is never the last, the higher never the first
        at_low = tl.where(low == 0, x0, tl.where(low == 1, x1, x2))
        at_high = tl.where(high == 1, x1, tl.where(high == 2, x2, x3))
        total += low_value[None, :, :].to(tl.float32) * at_low + high_value[None, :, :].to(tl.float32) * at_high
    result = tl.sum(total, axis=2)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y + m[:, None] * outputs + n[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _many_rows(  # type: ignore[no-untyped-def]
    x,
    values,
    positions,
    bias,
    y,
    runs,
    rows,
    outputs,
    groups,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    todo = groups
    if HAS_EXPERTS:  # one run of rows and their expert's weight
        run = runs + tl.program_id(0) * 3
        expert = tl.load(run).to(tl.int64)
        first = tl.load(run + 1).to(tl.int32)
        rows = tl.load(run + 2).to(tl.int32)
        values += expert * outputs * (2 * groups)
        positions += expert * outputs * ((groups + 1) // 2)
        todo = tl.where(first < rows, groups, 0)
    m = first + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = m.to(tl.int64)
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for g in range(0, todo, GROUPS):
        low_value, high_value, low, high = _load_packed(values, positions, n, g, outputs, groups, OUTPUTS, GROUPS)
        nothing = tl.zeros_like(low_value)
        w0 = tl.where(low == 0, low_value, nothing)
        w1 = tl.where(low == 1, low_value, tl.where(high == 1, high_value, nothing))
        w2 = tl.where(low == 2, low_value, tl.where(high == 2, high_value, nothing))
        w3 = tl.where(high == 3, high_value, nothing)
        weight = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (OUTPUTS, 4 * GROUPS))
        k = 4 * g + tl.arange(0, 4 * GROUPS)
        inside = (m < rows)[:, None] & (k < 4 * groups)[None, :]
        part = tl.load(x + row[:, None] * (4 * groups) + k[None, :], mask=inside, other=0.0)
        total = tl.dot(part, tl.trans(weight), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y + row[:, None] * outputs + n[None, :], total.to(y.dtype.element_ty), mask=inside)
