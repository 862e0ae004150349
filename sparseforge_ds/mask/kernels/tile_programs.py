"""Programs of the Triton kernels that update 2:4 masks of a whole partition, which `tiles` launches.

A program works on a tile: consecutive groups of one matrix, (N, 4) weights. Programs are compiled without contraction
of multiply-adds, as the step-by-step code rounds. Pointers have no annotation, since Triton reads annotations and has
none for them; a rate without one goes to the device in 32 bits.

Names: h is the curvature, w the weight, m a mask's code; a group's members have a number at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

CODE_STEPS: tl.constexpr = tl.constexpr(65535)
"""`codes.STEPS`."""
ROUNDING: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to an fp32 number below 2^22 and subtracted again, it rounds half to even."""


@triton.jit
def _tile(tiles, bounds):  # type: ignore[no-untyped-def]
    """Read the tables of tiles and of bounds for a program's tile, see `MatrixRun` and `TiledCurvature`.

    Returns:
        The tile's matrix, offset and count, the positions of its first row's factor and of column 0's factor, the
        number of columns, and the column that the tile begins in.
    """
    row = tiles + 4 * tl.program_id(0).to(tl.int64)
    matrix = tl.load(row)
    first = tl.load(row + 1)
    offset = tl.multiple_of(tl.load(row + 2), 8)
    count = tl.multiple_of(tl.load(row + 3).to(tl.int32), 8)
    share = tl.load(bounds + 3 * matrix)
    column = tl.load(bounds + 3 * matrix + 1)
    columns = tl.load(bounds + 3 * matrix + 2).to(tl.int32)
    # The only division of 64 bits.
    first_row = first // columns
    return matrix, offset, count, share + first_row, column, columns, (first - first_row * columns).to(tl.int32)


@triton.jit
def _curvature(factors, share, column, columns, begin, count, is_measured, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (N, 4) fp32 H of a tile: a product of factors, or 1 where the matrix is scored by magnitude."""
    # Rows are whole groups, so that a group has one share.
    group = begin + 4 * tl.arange(0, N)
    row_N = group // columns
    inside = (group - begin) < tl.where(is_measured, count, 0)
    share_N = tl.load(factors + share + row_N, mask=inside, other=0.0)
    position = (group - row_N * columns)[:, None] + tl.arange(0, 4)[None, :]
    column_N4 = tl.load(factors + column + position, mask=inside[:, None], other=0.0)
    return tl.where(is_measured, share_N[:, None] * column_N4, 1.0)


@triton.jit
def moments(dense, factors, measured, tiles, bounds, sums, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sums of `importance.score_moments` over a tile to its row of `sums`, (tiles, 8) fp64, the last 0."""
    # The tile's weights and curvature; what lies behind its end counts as 0.
    matrix, offset, count, share, column, columns, begin = _tile(tiles, bounds)
    position = 4 * tl.arange(0, N)[:, None] + tl.arange(0, 4)[None, :]
    inside = position < count
    w = tl.load(dense + offset + position, mask=inside, other=0.0).to(tl.float64)
    is_measured = tl.load(measured + matrix) != 0
    h = _curvature(factors, share, column, columns, begin, count, is_measured, N).to(tl.float64)
    positive = tl.where(inside, tl.where(h < 0, 0.0, h), 0.0)
    # Seven sums, in the order of `importance.score_moments`.
    square = w * w
    obd = positive * square
    row = sums + 8 * tl.program_id(0).to(tl.int64)
    tl.store(row, count.to(tl.float64))
    tl.store(row + 1, tl.sum(tl.sum(positive, axis=1), axis=0))
    tl.store(row + 2, tl.sum(tl.sum(obd, axis=1), axis=0))
    tl.store(row + 3, tl.sum(tl.sum(square, axis=1), axis=0))
    tl.store(row + 4, tl.sum(tl.sum(obd * obd, axis=1), axis=0))
    tl.store(row + 5, tl.sum(tl.sum(obd * square, axis=1), axis=0))
    tl.store(row + 6, tl.sum(tl.sum(square * square, axis=1), axis=0))
    tl.store(row + 7, 0.0)


@triton.jit
def add_up(sums, segments, totals, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sum of a matrix's rows of `sums`, (tiles, 8), to its row of `totals`, (matrices, 7), in one order."""
    matrix = tl.program_id(0).to(tl.int64)
    first = tl.load(segments + 2 * matrix)
    stop = tl.load(segments + 2 * matrix + 1)
    column = tl.arange(0, 8)[None, :]
    total = tl.zeros((ROWS, 8), dtype=tl.float64)
    for begin in range(first, stop, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        total += tl.load(sums + 8 * row + column, mask=row < stop, other=0.0)
    moment = tl.arange(0, 8)
    tl.store(totals + 7 * matrix + moment, tl.sum(total, axis=0), mask=moment < 7)


@triton.jit
def _members(values_N4, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Split (N, 4) into the four members of N groups."""
    even, odd = tl.split(tl.reshape(values_N4, (N, 2, 2)))
    value0, value2 = tl.split(even)
    value1, value3 = tl.split(odd)
    return value0, value1, value2, value3


@triton.jit
def _joined(value0, value1, value2, value3, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Undo `_members`."""
    return tl.reshape(tl.join(tl.join(value0, value2), tl.join(value1, value3)), (N, 4))


@triton.jit
def _ranks(value0, value1, value2, value3):  # type: ignore[no-untyped-def]
    """Return `pattern.rank_in_group`: how many members beat each; ties go to the lower index."""
    wins10 = (value1 > value0).to(tl.int32)
    wins20 = (value2 > value0).to(tl.int32)
    wins30 = (value3 > value0).to(tl.int32)
    wins21 = (value2 > value1).to(tl.int32)
    wins31 = (value3 > value1).to(tl.int32)
    wins32 = (value3 > value2).to(tl.int32)
    rank0 = wins10 + wins20 + wins30
    rank1 = 1 - wins10 + wins21 + wins31
    rank2 = 2 - wins20 - wins21 + wins32
    rank3 = 3 - wins30 - wins31 - wins32
    return rank0, rank1, rank2, rank3


@triton.jit
def _score(w_N4, h_N4, damping, mean, inverse_std):  # type: ignore[no-untyped-def]
    """Return `importance.standardized_score`: eqs. 3 and 4."""
    h = h_N4.to(tl.float64)
    w = w_N4.to(tl.float64)
    damped = tl.where(h < 0, 0.0, h) + damping
    return ((damped * (w * w) - mean) * inverse_std).to(tl.float32)


@triton.jit
def _lerp(start, end, nearer, offset):  # type: ignore[no-untyped-def]
    """Return `exact_lerp.exact_lerp`."""
    return tl.where(nearer > 0.5, end, start) + (end - start) * offset


@triton.jit
def _near(score, rank, MIDPOINT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a member's part of the threshold's sum, eq. 5."""
    if MIDPOINT:
        return tl.where((rank == 1) | (rank == 2), score, 0.0)
    return tl.where(rank == 1, score, 0.0)


@triton.jit
def _new_code(  # type: ignore[no-untyped-def]
    score, tau, rank, code, temperature, nearer_beta, offset_beta, pull, nearer_rate, offset_rate
):
    """Return a member's new code: eqs. 5 and 7 to 9."""
    exponent = (score - tau).to(tl.float64) / temperature
    gate = (1.0 / (1.0 + tl.exp(-exponent))).to(tl.float32)
    hard = (rank < 2).to(tl.float32)
    old = code.to(tl.float32) * (1.0 / CODE_STEPS)
    gate = _lerp(gate, hard, nearer_beta, offset_beta)
    gate = gate - (old - hard) * pull
    gate = tl.minimum(tl.maximum(gate, 0.0), 1.0)
    new = _lerp(old, gate, nearer_rate, offset_rate)
    return ((new * CODE_STEPS + ROUNDING) - ROUNDING).to(tl.int32)


@triton.jit
def _effective(code, rank, nearer_x, offset_x):  # type: ignore[no-untyped-def]
    """Return a member's effective mask, eq. 10."""
    soft = code.to(tl.float32) * (1.0 / CODE_STEPS)
    return _lerp((rank < 2).to(tl.float32), soft, nearer_x, offset_x)


@triton.jit
def _is_wrong(code, rank):  # type: ignore[no-untyped-def]
    """Return True where the paper's rule 1[m > 0.5] would decide otherwise."""
    return (code > 32767) != (rank < 2)


@triton.jit
def _choices(rank0, rank1, rank2, rank3, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pack which members of N groups are their two best: (N / 2,) bytes of two groups each."""
    best0 = (rank0 < 2).to(tl.int32)
    best1 = (rank1 < 2).to(tl.int32) << 1
    best2 = (rank2 < 2).to(tl.int32) << 2
    best3 = (rank3 < 2).to(tl.int32) << 3
    low, high = tl.split(tl.reshape(best0 | best1 | best2 | best3, (N // 2, 2)))
    return low | (high << 4)


@triton.jit
def _set_bits(packed):  # type: ignore[no-untyped-def]
    """Return `bits.set_bits`."""
    pairs = packed - ((packed >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F


@triton.jit
def update(  # type: ignore[no-untyped-def]
    dense,
    mask,
    target,
    kept,
    master,
    factors,
    measured,
    scaling,
    tiles,
    bounds,
    sums,
    temperature: tl.float64,
    nearer_beta,
    offset_beta,
    pull,
    nearer_rate,
    offset_rate,
    nearer_x,
    offset_x,
    MIDPOINT: tl.constexpr,
    N: tl.constexpr,
):
    """Move the mask of a tile (`mask.update.update_mask`), store what is chosen, and publish (`soft_publish`).

    Its row of `sums`, (tiles, 4) fp32, gets the sums of `m (1 - m)` and `m`, the changed bits of the target, and the
    groups that the paper's own rule would decide otherwise.
    """
    matrix, offset, count, share, column, columns, begin = _tile(tiles, bounds)
    position = 4 * tl.arange(0, N)[:, None] + tl.arange(0, 4)[None, :]
    inside = position < count
    w = tl.load(dense + offset + position, mask=inside, other=0.0)
    m = tl.load(mask + offset + position, mask=inside, other=0).to(tl.int32)
    is_measured = tl.load(measured + matrix) != 0
    h = _curvature(factors, share, column, columns, begin, count, is_measured, N)
    # eqs. 3, 4 and 6: scores, and the two best of every group
    damping = tl.load(scaling + 3 * matrix)
    mean = tl.load(scaling + 3 * matrix + 1)
    inverse_std = tl.load(scaling + 3 * matrix + 2)
    score0, score1, score2, score3 = _members(_score(w, h, damping, mean, inverse_std), N)
    rank0, rank1, rank2, rank3 = _ranks(score0, score1, score2, score3)
    # eq. 5: the threshold; every other term is 0, which leaves the sum exact
    tau = _near(score0, rank0, MIDPOINT) + _near(score1, rank1, MIDPOINT)
    tau += _near(score2, rank2, MIDPOINT) + _near(score3, rank3, MIDPOINT)
    if MIDPOINT:
        tau = tau * 0.5
    # eqs. 5 and 7 to 9: the new mask
    m0, m1, m2, m3 = _members(m, N)
    m0 = _new_code(score0, tau, rank0, m0, temperature, nearer_beta, offset_beta, pull, nearer_rate, offset_rate)
    m1 = _new_code(score1, tau, rank1, m1, temperature, nearer_beta, offset_beta, pull, nearer_rate, offset_rate)
    m2 = _new_code(score2, tau, rank2, m2, temperature, nearer_beta, offset_beta, pull, nearer_rate, offset_rate)
    m3 = _new_code(score3, tau, rank3, m3, temperature, nearer_beta, offset_beta, pull, nearer_rate, offset_rate)
    m = _joined(m0, m1, m2, m3, N)
    tl.store(mask + offset + position, m.to(tl.uint16), mask=inside)
    # What is chosen, by the scores and by the new mask.
    byte = tl.arange(0, N // 2)
    is_byte = 8 * byte < count
    chosen = _choices(rank0, rank1, rank2, rank3, N)
    before = tl.load(target + offset // 8 + byte, mask=is_byte, other=0).to(tl.int32)
    tl.store(target + offset // 8 + byte, chosen.to(tl.uint8), mask=is_byte)
    rank0, rank1, rank2, rank3 = _ranks(m0, m1, m2, m3)
    tl.store(kept + offset // 8 + byte, _choices(rank0, rank1, rank2, rank3, N).to(tl.uint8), mask=is_byte)
    # eqs. 1 and 10: the published weight, without the sign of zeros
    effective0 = _effective(m0, rank0, nearer_x, offset_x)
    effective1 = _effective(m1, rank1, nearer_x, offset_x)
    effective2 = _effective(m2, rank2, nearer_x, offset_x)
    effective3 = _effective(m3, rank3, nearer_x, offset_x)
    published = w * _joined(effective0, effective1, effective2, effective3, N)
    published = tl.where(published == 0.0, 0.0, published)
    tl.store(master + offset + position, published.to(master.dtype.element_ty), mask=inside)
    # Sums for metrics.
    value = tl.where(inside, m.to(tl.float32) * (1.0 / CODE_STEPS), 0.0)
    flips = tl.where(is_byte, _set_bits(before ^ chosen), 0)
    wrong = _is_wrong(m0, rank0) | _is_wrong(m1, rank1) | _is_wrong(m2, rank2) | _is_wrong(m3, rank3)
    wrong = wrong & (4 * tl.arange(0, N) < count)
    row = sums + 4 * tl.program_id(0).to(tl.int64)
    tl.store(row, tl.sum(tl.sum(value * (1 - value), axis=1), axis=0))
    tl.store(row + 1, tl.sum(tl.sum(value, axis=1), axis=0))
    tl.store(row + 2, tl.sum(flips, axis=0).to(tl.float32))
    tl.store(row + 3, tl.sum(wrong.to(tl.int32), axis=0).to(tl.float32))
