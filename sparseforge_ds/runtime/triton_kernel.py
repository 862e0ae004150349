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
import triton.language as tl
from torch import Tensor

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
    x, values, positions = _whole_words(x), _whole_words(values), positions.contiguous()
    added = y if bias is None else bias  # a pointer that is not read
    how = constants(tile, bias is not None and tile.splits == 1, _even(positions, groups))
    with _on(x):
        if tile.few:
            tensors = (x, values, positions, added, y)
            _few_rows[(parts,)](*tensors, y, 0, rows, outputs, groups, HAS_EXPERTS=False, **how, **_options(tile))
            return
        to = y if tile.splits == 1 else x.new_empty(tile.splits, rows, outputs, dtype=torch.float32)
        grid, sizes = (triton.cdiv(rows, tile.rows), parts, tile.splits), (rows, outputs, groups, _each(tile, groups))
        _many_rows[grid](x, values, positions, added, to, y, *sizes, HAS_EXPERTS=False, **how, **_options(tile))
        if tile.splits > 1:
            count = rows * outputs
            adders = (triton.cdiv(count, _ADDED),)
            _add_parts[adders](to, added, y, tile.splits, count, outputs, HAS_BIAS=bias is not None, SIZE=_ADDED)


def unpack(values: Tensor, positions: Tensor, tile: Tile = UNPACKING) -> Tensor:
    """(out, in/2) and positions -> the dense weight, (out, in)."""
    outputs, groups = values.shape[0], values.shape[1] // 2
    values, positions = _whole_words(values), positions.contiguous()
    dense = values.new_empty(outputs, 4 * groups)
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(groups, tile.groups))
    how = {"EVEN": _even(positions, groups), "OUTPUTS": tile.outputs, "GROUPS": tile.groups, **_options(tile)}
    with _on(values):
        _unpack[grid](values, positions, dense, outputs, groups, **how)
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
    tensors = (_whole_words(x), _whole_words(values), positions, y, y)
    how = {**constants(tile, False, _even(positions, groups)), **_options(tile)}
    with _on(x):
        if few:
            numbers = torch.arange(rows, device=x.device, dtype=ends.dtype)
            experts = torch.searchsorted(ends, numbers, right=True)
            _few_rows[(parts, rows)](*tensors, experts, count, 1, outputs, groups, HAS_EXPERTS=True, **how)
        else:
            runs = divide_rows(ends, rows, tile.rows)
            _many_rows[(runs.shape[0], parts, 1)](
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
    starts = torch.nn.functional.pad(ends, (1, -1))
    runs_of = (ends - starts + most - 1) // most
    up_to = runs_of.cumsum(0)
    run = torch.arange(min(rows, rows // most + len(ends)), device=ends.device)
    expert = torch.searchsorted(up_to, run, right=True).clamp(max=len(ends) - 1)
    first = starts[expert] + (run - (up_to - runs_of)[expert]) * most
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


def _whole_words(tensor: Tensor) -> Tensor:
    """The same, where 16 bytes may be read at once: a view can begin anywhere."""
    tensor = tensor.contiguous()
    return tensor if _begins_at(tensor, 16) else tensor.clone()


def _begins_at(tensor: Tensor, unit: int) -> bool:
    """Whether its first byte is at a multiple of so many."""
    return tensor.data_ptr() % unit == 0


def _even(positions: Tensor, groups: int) -> int:
    """Words of 16 bits in which each row's positions come, four groups in one: 4 at a time, 1 at a time, or 0."""
    return 0 if groups % 4 or not _begins_at(positions, 8) else 1 if groups % 16 else 4


@triton.jit
def _load_places(positions, row, quad, wanted, groups, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of rows and quads of groups (.., 1, 1) and (1, quads, 1) the half bytes with the positions, (.., quads, 4)."""
    if EVEN:
        quads = tl.multiple_of(groups // 4, EVEN)  # so that Triton sees which loads may be wide and asynchronous
        words = positions.to(tl.pointer_type(tl.int16), bitcast=True)
        word = tl.load(words + row * quads + quad, mask=wanted & (quad < quads), other=0).to(tl.int32)
    else:
        stride = (groups + 1) // 2
        first = positions + row * stride + 2 * quad
        word = tl.load(first, mask=wanted & (2 * quad < stride), other=0).to(tl.int32)
        word |= tl.load(first + 1, mask=wanted & (2 * quad + 1 < stride), other=0).to(tl.int32) << 8
    return (word >> (4 * tl.arange(0, 4))[None, None, :]) & 15


@triton.jit
def _load_once(address, inside):  # type: ignore[no-untyped-def]
    """16 bytes of which nobody else needs any, in four words: written out, as Triton would have the threads exchange
    what each has loaded."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=r,=r,=r,=r,l,r",
        [address.to(tl.int64), inside.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load_shared(address, inside):  # type: ignore[no-untyped-def]
    """16 bytes that other programs need, too."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=r,=r,=r,=r,l,r",
        [address.to(tl.int64), inside.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load_word(address, inside):  # type: ignore[no-untyped-def]
    """Two bytes of which nobody else needs any."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.L1::no_allocate.u16 $0, [$1]; }",
        "=r,l,r",
        [address.to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _product_of_group(pair, x01, x23, half, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of two kept values with the two of four inputs that are theirs, which one instruction picks."""
    select = ((half | half << 6) & 0x0303) * 0x22 + 0x1010
    chosen = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x01, x23, select], dtype=tl.int32, is_pure=True, pack=1
    )
    low, high = _both_halves(pair, dtype)
    x_low, x_high = _both_halves(chosen, dtype)
    return low * x_low + high * x_high


@triton.jit
def _sum_of_whole_quads(  # type: ignore[no-untyped-def]
    x, values, positions, m, n, rows, outputs, quads, QUADS: tl.constexpr, AHEAD: tl.constexpr
):
    """Each thread takes four groups at a time: 16 bytes of values and a word of positions."""
    dtype: tl.constexpr = values.dtype.element_ty
    row, m, at = n.to(tl.int64)[None, :, None], m[:, None, None], tl.arange(0, QUADS)[None, None, :]
    total = tl.zeros((m.shape[0], n.shape[0], QUADS), dtype=tl.float32)
    values += 8 * (row * quads + at)
    positions += 2 * (row * quads + at)
    x += 16 * (m * quads + at)
    for q in tl.range(0, quads, QUADS, loop_unroll_factor=AHEAD):
        inside = (row < outputs) & (q + at < quads)
        there = (m < rows) & (q + at < quads)
        v0, v1, v2, v3 = _load_once(values + 8 * q, inside)
        word = _load_word(positions + 2 * q, inside)
        a0, a1, a2, a3 = _load_shared(x + 16 * q, there)
        b0, b1, b2, b3 = _load_shared(x + 16 * q + 8, there)
        total += _product_of_group(v0, a0, a1, word & 15, dtype)
        total += _product_of_group(v1, a2, a3, (word >> 4) & 15, dtype)
        total += _product_of_group(v2, b0, b1, (word >> 8) & 15, dtype)
        total += _product_of_group(v3, b2, b3, word >> 12, dtype)
    return tl.sum(total, axis=2)


@triton.jit
def _choose_pair(four, half):  # type: ignore[no-untyped-def]
    """Of four 16-bit inputs in a word of 64 the two that are kept, in one of 32."""
    low = (four >> (half % 4 * 16).to(tl.int64)).to(tl.int32) & 0xFFFF
    return low | (four >> (half // 4 * 16).to(tl.int64)).to(tl.int32) << 16


@triton.jit
def _spread_pair(pair, half, PRMT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of two kept 16-bit values in a word of 32 all four with zeros, in one of 64."""
    low, high = half % 4, half // 4
    if PRMT:
        select = 0x44444444 ^ (0x54 << (8 * low)) ^ (0x76 << (8 * high))
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, s; shr.u32 s, $2, 16; "
            "prmt.b32 a, $1, 0, $2; prmt.b32 b, $1, 0, s; mov.b64 $0, {a, b}; }",
            "=l,r,r",
            [pair, select],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        first, second = (pair & 0xFFFF).to(tl.int64), ((pair >> 16) & 0xFFFF).to(tl.int64)
        return (first << (16 * low).to(tl.int64)) | (second << (16 * high).to(tl.int64))


@triton.jit
def _both_halves(pair, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two 16-bit numbers of a word in fp32."""
    if dtype == tl.bfloat16:  # it is the upper half of fp32
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
        return low.to(dtype, bitcast=True).to(tl.float32), high.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _sum_of_groups(  # type: ignore[no-untyped-def]
    x, values, positions, m, n, rows, outputs, groups, GROUPS: tl.constexpr, EVEN: tl.constexpr
):
    dtype: tl.constexpr = values.dtype.element_ty
    row = n.to(tl.int64)[:, None, None]
    wanted = (n < outputs)[:, None, None]
    total = tl.zeros((m.shape[0], n.shape[0], GROUPS // 4, 4), dtype=tl.float32)
    for g in range(0, groups, GROUPS):
        quad = g // 4 + tl.arange(0, GROUPS // 4)[None, :, None]
        group = 4 * quad + tl.arange(0, 4)[None, None, :]
        inside = wanted & (group < groups)
        half = _load_places(positions, row, quad, wanted, groups, EVEN)
        at = m[:, None, None, None] * groups + group[None, :, :, :]
        there = (m < rows)[:, None, None, None] & (group < groups)[None, :, :, :]
        if dtype == tl.float32:
            first = values + 2 * (row * groups + group)
            low, high = tl.load(first, mask=inside, other=0.0), tl.load(first + 1, mask=inside, other=0.0)
            x_low = tl.load(x + 4 * at + (half & 3)[None, :, :, :], mask=there, other=0.0)
            x_high = tl.load(x + 4 * at + (half >> 2)[None, :, :, :], mask=there, other=0.0)
        else:
            pairs = values.to(tl.pointer_type(tl.int32), bitcast=True)
            low, high = _both_halves(tl.load(pairs + row * groups + group, mask=inside, other=0), dtype)
            four = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + at, mask=there, other=0)
            x_low, x_high = _both_halves(_choose_pair(four, half[None, :, :, :]), dtype)
        total += low[None, :, :, :] * x_low + high[None, :, :, :] * x_high
    return tl.sum(tl.sum(total, axis=3), axis=2)


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
    EVEN: tl.constexpr,
    PRMT: tl.constexpr,
    AHEAD: tl.constexpr,
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
    if PRMT and EVEN and values.dtype.element_ty != tl.float32:
        result = _sum_of_whole_quads(x, values, positions, m, n, rows, outputs, groups // 4, GROUPS // 4, AHEAD)
    else:
        result = _sum_of_groups(x, values, positions, m, n, rows, outputs, groups, GROUPS, EVEN)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y + m[:, None] * outputs + n[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load_four(values, positions, row, quad, wanted, groups, EVEN: tl.constexpr, PRMT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four elements of each group of the dense weight, each (outputs, quads, 4)."""
    dtype: tl.constexpr = values.dtype.element_ty
    group = 4 * quad + tl.arange(0, 4)[None, None, :]
    inside = wanted & (group < groups)
    half = _load_places(positions, row, quad, wanted, groups, EVEN)
    if dtype == tl.float32:
        low, high = half & 3, half >> 2
        first = values + 2 * (row * groups + group)
        low_value, high_value = tl.load(first, mask=inside, other=0.0), tl.load(first + 1, mask=inside, other=0.0)
        w0 = tl.where(low == 0, low_value, 0.0)
        w1 = tl.where(low == 1, low_value, tl.where(high == 1, high_value, 0.0))
        w2 = tl.where(low == 2, low_value, tl.where(high == 2, high_value, 0.0))
        w3 = tl.where(high == 3, high_value, 0.0)
    else:
        pairs = values.to(tl.pointer_type(tl.int32), bitcast=True)
        word = _spread_pair(tl.load(pairs + row * groups + group, mask=inside, other=0), half, PRMT)
        w0 = word.to(tl.int16).to(dtype, bitcast=True)
        w1 = (word >> 16).to(tl.int16).to(dtype, bitcast=True)
        w2 = (word >> 32).to(tl.int16).to(dtype, bitcast=True)
        w3 = (word >> 48).to(tl.int16).to(dtype, bitcast=True)
    return w0, w1, w2, w3


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
    each,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    PRMT: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    begin = tl.program_id(2) * each
    end = tl.minimum(begin + each, groups)
    y += tl.program_id(2).to(tl.int64) * rows * outputs
    if HAS_EXPERTS:  # one run of rows and their expert's weight
        run = runs + tl.program_id(0) * 3
        expert = tl.load(run).to(tl.int64)
        first = tl.load(run + 1).to(tl.int32)
        rows = tl.load(run + 2).to(tl.int32)
        values += expert * outputs * (2 * groups)
        positions += expert * outputs * ((groups + 1) // 2)
        end = tl.where(first < rows, groups, 0)
    m = first + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = m.to(tl.int64)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for g in range(begin, end, GROUPS):
        quad = g // 4 + tl.arange(0, GROUPS // 4)[None, :, None]
        w0, w1, w2, w3 = _load_four(
            values, positions, n.to(tl.int64)[:, None, None], quad, (n < outputs)[:, None, None], groups, EVEN, PRMT
        )
        weight = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (OUTPUTS, 4 * GROUPS))
        k = 4 * g + tl.arange(0, 4 * GROUPS)
        inside = (m < rows)[:, None] & (k < 4 * groups)[None, :]
        part = tl.load(x + row[:, None] * (4 * groups) + k[None, :], mask=inside, other=0.0)
        total = tl.dot(weight, tl.trans(part), total, input_precision="ieee")
    total = tl.trans(total)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y + row[:, None] * outputs + n[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(parts, bias, y, splits, count, outputs, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum what the programs of `_many_rows` wrote, always in the same order."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * count + at, mask=at < count, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % outputs, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < count)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    values,
    positions,
    dense,
    outputs,
    groups,
    EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = n.to(tl.int64)[:, None, None]
    wanted = (n < outputs)[:, None, None]
    quad = tl.program_id(1) * (GROUPS // 4) + tl.arange(0, GROUPS // 4)[None, :, None]
    group = 4 * quad + tl.arange(0, 4)[None, None, :]
    inside = wanted & (group < groups)
    if values.dtype.element_ty == tl.float32:
        w0, w1, w2, w3 = _load_four(values, positions, row, quad, wanted, groups, EVEN, False)
        to = dense + 4 * (row * groups + group)
        tl.store(to, w0, mask=inside)
        tl.store(to + 1, w1, mask=inside)
        tl.store(to + 2, w2, mask=inside)
        tl.store(to + 3, w3, mask=inside)
    else:
        half = _load_places(positions, row, quad, wanted, groups, EVEN)
        pairs = values.to(tl.pointer_type(tl.int32), bitcast=True)
        pair = tl.load(pairs + row * groups + group, mask=inside, other=0)
        to = dense.to(tl.pointer_type(tl.int64), bitcast=True) + row * groups + group
        tl.store(to, _spread_pair(pair, half, False), mask=inside)
