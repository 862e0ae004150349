"""Programs of the Triton kernels for packed 2:4 weights, which `triton_kernel` launches.

They are compiled for a device and for every set of constants (tl.constexpr). AMD's GPUs and Triton's interpreter take
the plain path, NVIDIA's GPUs the inline assembly of `triton_words`. Other arguments have no annotation, since Triton
reads annotations and has none for a pointer or a tile.

Names: m rows of x, n outputs of the weight (`row` their 64-bit numbers), a group is four inputs, a quad four groups.
PER_SCALE is the groups that share a scale of int4, whose values are scaled as they are loaded; None: sums are scaled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseforge_ds.extras.packed24.triton_words import (
    both_halves,
    choose_pair,
    decode,
    load_four_bytes,
    load_four_words,
    load_positions,
    load_scale,
    load_two_words,
    load_word,
    product_of_group,
    spread_pair,
)


@triton.jit
def _quad_of_values(values, inside, dtype: tl.constexpr, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the eight kept values of a quad in fp32."""
    if GRID is None:
        v0, v1, v2, v3 = load_four_words(values, inside, True)
        a, b = both_halves(v0, dtype)
        c, d = both_halves(v1, dtype)
        e, f = both_halves(v2, dtype)
        g, h = both_halves(v3, dtype)
    elif GRID == "int4":
        word = load_four_bytes(values, inside)
        a, b, c, d = decode(word, GRID), decode(word >> 4, GRID), decode(word >> 8, GRID), decode(word >> 12, GRID)
        word = word >> 16
        e, f, g, h = decode(word, GRID), decode(word >> 4, GRID), decode(word >> 8, GRID), decode(word >> 12, GRID)
    else:
        low, high = load_two_words(values, inside)
        a, b, c, d = decode(low, GRID), decode(low >> 8, GRID), decode(low >> 16, GRID), decode(low >> 24, GRID)
        e, f, g, h = decode(high, GRID), decode(high >> 8, GRID), decode(high >> 16, GRID), decode(high >> 24, GRID)
    return a, b, c, d, e, f, g, h


@triton.jit
def _sum_of_whole_quads(  # type: ignore[no-untyped-def]
    x,
    values,
    positions,
    scale,
    m,
    n,
    rows,
    outputs,
    quads,
    QUADS: tl.constexpr,
    AHEAD: tl.constexpr,
    GRID: tl.constexpr,
    PER_SCALE: tl.constexpr,
):
    """Sum (rows, outputs) of a tile, if a thread can take a quad at a time: its values and a word of positions."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = n.to(tl.int64)[None, :, None]
    m = m[:, None, None]
    at = tl.arange(0, QUADS)[None, None, :]
    total = tl.zeros((m.shape[0], n.shape[0], QUADS), dtype=tl.float32)
    SIZE: tl.constexpr = 4 if GRID == "int4" else 8
    values += SIZE * (row * quads + at)
    positions += 2 * (row * quads + at)
    x += 16 * (m * quads + at)
    for q in tl.range(0, quads, QUADS, loop_unroll_factor=AHEAD):
        inside = (row < outputs) & (q + at < quads)
        inside_x = (m < rows) & (q + at < quads)
        v0, v1, v2, v3, v4, v5, v6, v7 = _quad_of_values(values + SIZE * q, inside, dtype, GRID)
        word = load_word(positions + 2 * q, inside)
        a0, a1, a2, a3 = load_four_words(x + 16 * q, inside_x, False)
        b0, b1, b2, b3 = load_four_words(x + 16 * q + 8, inside_x, False)
        # Two values and two words of inputs a group.
        if PER_SCALE is None:
            total += product_of_group(v0, v1, a0, a1, word & 15, dtype)
            total += product_of_group(v2, v3, a2, a3, (word >> 4) & 15, dtype)
            total += product_of_group(v4, v5, b0, b1, (word >> 8) & 15, dtype)
            total += product_of_group(v6, v7, b2, b3, word >> 12, dtype)
        else:
            part = product_of_group(v0, v1, a0, a1, word & 15, dtype)
            part += product_of_group(v2, v3, a2, a3, (word >> 4) & 15, dtype)
            part += product_of_group(v4, v5, b0, b1, (word >> 8) & 15, dtype)
            part += product_of_group(v6, v7, b2, b3, word >> 12, dtype)
            total += part * load_scale(scale, row * (4 * quads // PER_SCALE) + 4 * (q + at) // PER_SCALE, inside)
    return tl.sum(total, axis=2)


@triton.jit
def _pair_of_values(  # type: ignore[no-untyped-def]
    values,
    scale,
    row,
    group,
    groups,
    inside,
    dtype: tl.constexpr,
    GRID: tl.constexpr,
    PER_SCALE: tl.constexpr,
):
    """Load the two kept values of each group of a row in fp32."""
    at = row * groups + group
    if GRID == "int4":
        pair = tl.load(values + at, mask=inside, other=0).to(tl.int32)
        low, high = decode(pair, GRID), decode(pair >> 4, GRID)
        if PER_SCALE is not None:
            factor = load_scale(scale, row * (groups // PER_SCALE) + group // PER_SCALE, inside)
            low, high = low * factor, high * factor
    elif GRID is not None:
        pairs = values.to(tl.pointer_type(tl.int16), bitcast=True)
        pair = tl.load(pairs + at, mask=inside, other=0).to(tl.int32)
        low, high = decode(pair, GRID), decode(pair >> 8, GRID)
    elif dtype == tl.float32:
        low = tl.load(values + 2 * at, mask=inside, other=0.0)
        high = tl.load(values + 2 * at + 1, mask=inside, other=0.0)
    else:
        pairs = values.to(tl.pointer_type(tl.int32), bitcast=True)
        low, high = both_halves(tl.load(pairs + at, mask=inside, other=0), dtype)
    return low, high


@triton.jit
def _sum_of_groups(  # type: ignore[no-untyped-def]
    x,
    values,
    positions,
    scale,
    m,
    n,
    rows,
    outputs,
    groups,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    GRID: tl.constexpr,
    PER_SCALE: tl.constexpr,
):
    """Sum (rows, outputs) of a tile, for any dtype, alignment and number of groups."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = n.to(tl.int64)[:, None, None]
    wanted = (n < outputs)[:, None, None]
    total = tl.zeros((m.shape[0], n.shape[0], GROUPS // 4, 4), dtype=tl.float32)
    for g in range(0, groups, GROUPS):
        quad = g // 4 + tl.arange(0, GROUPS // 4)[None, :, None]
        group = 4 * quad + tl.arange(0, 4)[None, None, :]
        inside = wanted & (group < groups)
        half = load_positions(positions, row, quad, wanted, groups, EVEN)
        at = m[:, None, None, None] * groups + group[None, :, :, :]
        inside_x = (m < rows)[:, None, None, None] & (group < groups)[None, :, :, :]
        # Two values a group, and the two of its four inputs that the positions name.
        low, high = _pair_of_values(values, scale, row, group, groups, inside, dtype, GRID, PER_SCALE)
        if dtype == tl.float32:
            x_low = tl.load(x + 4 * at + (half & 3)[None, :, :, :], mask=inside_x, other=0.0)
            x_high = tl.load(x + 4 * at + (half >> 2)[None, :, :, :], mask=inside_x, other=0.0)
        else:
            four = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + at, mask=inside_x, other=0)
            x_low, x_high = both_halves(choose_pair(four, half[None, :, :, :]), dtype)
        total += low[None, :, :, :] * x_low + high[None, :, :, :] * x_high
    return tl.sum(tl.sum(total, axis=3), axis=2)


@triton.jit
def few_rows(  # type: ignore[no-untyped-def]
    x,
    values,
    positions,
    scale,
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
    GRID: tl.constexpr,
    PER_SCALE: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
):
    """Multiply up to `FEW_ROWS` rows, or one row of a mixture, with the packed weight of some outputs."""
    if HAS_EXPERTS:  # one row and its expert's weight; a row without an expert has no outputs
        row = tl.program_id(1).to(tl.int64)
        expert = tl.load(experts + row).to(tl.int64)
        x += row * (4 * groups)
        y += row * outputs
        values += expert * outputs * (groups if GRID == "int4" else 2 * groups)
        positions += expert * outputs * ((groups + 1) // 2)
        scale += expert * outputs * (1 if PER_SCALE is None else groups // PER_SCALE)
        outputs = tl.where(expert < count, outputs, 0)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.arange(0, ROWS)
    # The fast path needs byte selection, aligned positions and inputs of 16 bits.
    if PRMT and EVEN and x.dtype.element_ty != tl.float32:
        result = _sum_of_whole_quads(
            x, values, positions, scale, m, n, rows, outputs, groups // 4, GROUPS // 4, AHEAD, GRID, PER_SCALE
        )
    else:
        result = _sum_of_groups(x, values, positions, scale, m, n, rows, outputs, groups, GROUPS, EVEN, GRID, PER_SCALE)
    _store(result, scale, bias, y, m, m < rows, n, outputs, GRID is not None and PER_SCALE is None, HAS_BIAS)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    result, scale, bias, y, row, wanted, n, outputs, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Store the sums of a tile, (rows, outputs) in fp32, scaled, plus the bias, in y's dtype."""
    if HAS_SCALE:
        result *= load_scale(scale, n, n < outputs)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    inside = wanted[:, None] & (n < outputs)[None, :]
    tl.store(y + row[:, None] * outputs + n[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load_four(  # type: ignore[no-untyped-def]
    values,
    positions,
    scale,
    row,
    quad,
    wanted,
    groups,
    dtype: tl.constexpr,
    EVEN: tl.constexpr,
    PRMT: tl.constexpr,
    GRID: tl.constexpr,
    PER_SCALE: tl.constexpr,
):
    """Return the four elements of each group of the dense weight in `dtype`, each (outputs, quads, 4).

    They are scaled if PER_SCALE is not None.
    """
    group = 4 * quad + tl.arange(0, 4)[None, None, :]
    inside = wanted & (group < groups)
    half = load_positions(positions, row, quad, wanted, groups, EVEN)
    if dtype == tl.float32 or GRID is not None:
        low = half & 3
        high = half >> 2
        low_value, high_value = _pair_of_values(values, scale, row, group, groups, inside, dtype, GRID, PER_SCALE)
        w0 = tl.where(low == 0, low_value, 0.0).to(dtype)
        w1 = tl.where(low == 1, low_value, tl.where(high == 1, high_value, 0.0)).to(dtype)
        w2 = tl.where(low == 2, low_value, tl.where(high == 2, high_value, 0.0)).to(dtype)
        w3 = tl.where(high == 3, high_value, 0.0).to(dtype)
    else:
        pairs = values.to(tl.pointer_type(tl.int32), bitcast=True)
        word = spread_pair(tl.load(pairs + row * groups + group, mask=inside, other=0), half, PRMT)
        w0 = word.to(tl.int16).to(dtype, bitcast=True)
        w1 = (word >> 16).to(tl.int16).to(dtype, bitcast=True)
        w2 = (word >> 32).to(tl.int16).to(dtype, bitcast=True)
        w3 = (word >> 48).to(tl.int16).to(dtype, bitcast=True)
    return w0, w1, w2, w3


@triton.jit
def many_rows(  # type: ignore[no-untyped-def]
    x,
    values,
    positions,
    scale,
    bias,
    y,
    runs,
    rows,
    outputs,
    groups,
    split_groups,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    PRMT: tl.constexpr,
    GRID: tl.constexpr,
    PER_SCALE: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
):
    """Multiply a tile of rows with an unpacked tile of the weight on the tensor cores, over one part of the inputs."""
    first = tl.program_id(0) * ROWS
    begin = tl.program_id(2) * split_groups
    end = tl.minimum(begin + split_groups, groups)
    y += tl.program_id(2).to(tl.int64) * rows * outputs
    if HAS_EXPERTS:  # one run of rows and their expert's weight
        run = runs + tl.program_id(0) * 3
        expert = tl.load(run).to(tl.int64)
        first = tl.load(run + 1).to(tl.int32)
        rows = tl.load(run + 2).to(tl.int32)
        values += expert * outputs * (groups if GRID == "int4" else 2 * groups)
        positions += expert * outputs * ((groups + 1) // 2)
        scale += expert * outputs * (1 if PER_SCALE is None else groups // PER_SCALE)
        end = tl.where(first < rows, groups, 0)
    m = first + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = m.to(tl.int64)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for g in range(begin, end, GROUPS):
        quad = g // 4 + tl.arange(0, GROUPS // 4)[None, :, None]
        w0, w1, w2, w3 = _load_four(
            values,
            positions,
            scale,
            n.to(tl.int64)[:, None, None],
            quad,
            (n < outputs)[:, None, None],
            groups,
            x.dtype.element_ty,
            EVEN,
            PRMT,
            GRID,
            PER_SCALE,
        )
        # Interleave the four elements of the groups.
        weight = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (OUTPUTS, 4 * GROUPS))
        k = 4 * g + tl.arange(0, 4 * GROUPS)
        inside = (m < rows)[:, None] & (k < 4 * groups)[None, :]
        part = tl.load(x + row[:, None] * (4 * groups) + k[None, :], mask=inside, other=0.0)
        total = tl.dot(weight, tl.trans(part), total, input_precision="ieee")
    _store(tl.trans(total), scale, bias, y, row, m < rows, n, outputs, HAS_SCALE, HAS_BIAS)


@triton.jit
def add_parts(  # type: ignore[no-untyped-def]
    parts,
    scale,
    bias,
    y,
    splits,
    count,
    outputs,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Add up the parts that `many_rows` has written, always in the same order, scale them, and add the bias."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * count + at, mask=at < count, other=0.0)
    if HAS_SCALE:
        total *= load_scale(scale, at % outputs, at < count)
    if HAS_BIAS:
        total += tl.load(bias + at % outputs, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < count)


@triton.jit
def unpack(  # type: ignore[no-untyped-def]
    values,
    positions,
    scale,
    dense,
    outputs,
    groups,
    EVEN: tl.constexpr,
    GRID: tl.constexpr,
    PER_SCALE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write a tile of the dense weight."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = n.to(tl.int64)[:, None, None]
    wanted = (n < outputs)[:, None, None]
    quad = tl.program_id(1) * (GROUPS // 4) + tl.arange(0, GROUPS // 4)[None, :, None]
    group = 4 * quad + tl.arange(0, 4)[None, None, :]
    inside = wanted & (group < groups)
    # Four numbers a group, or one word of 64 bits.
    if GRID is not None or values.dtype.element_ty == tl.float32:
        w0, w1, w2, w3 = _load_four(
            values, positions, scale, row, quad, wanted, groups, tl.float32, EVEN, False, GRID, PER_SCALE
        )
        if GRID is not None and PER_SCALE is None:
            factor = load_scale(scale, n, n < outputs)[:, None, None]
            w0, w1, w2, w3 = w0 * factor, w1 * factor, w2 * factor, w3 * factor
        to = dense + 4 * (row * groups + group)
        tl.store(to, w0.to(dense.dtype.element_ty), mask=inside)
        tl.store(to + 1, w1.to(dense.dtype.element_ty), mask=inside)
        tl.store(to + 2, w2.to(dense.dtype.element_ty), mask=inside)
        tl.store(to + 3, w3.to(dense.dtype.element_ty), mask=inside)
    else:
        half = load_positions(positions, row, quad, wanted, groups, EVEN)
        pairs = values.to(tl.pointer_type(tl.int32), bitcast=True)
        pair = tl.load(pairs + row * groups + group, mask=inside, other=0)
        to = dense.to(tl.pointer_type(tl.int64), bitcast=True) + row * groups + group
        tl.store(to, spread_pair(pair, half, False), mask=inside)
