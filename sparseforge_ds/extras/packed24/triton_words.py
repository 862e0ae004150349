"""Words of packed weights and of x in Triton: loads, and conversions of their content.

Inline assembly is for NVIDIA's GPUs; a constant tells the caller that there is one. Triton's values have no types that
a checker knows, here and in `triton_programs`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_positions(positions, row, quad, wanted, groups, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the half bytes with the positions of groups, (.., quads, 4), for rows (.., 1, 1) and quads (1, quads, 1)."""
    if EVEN:
        quads = tl.multiple_of(groups // 4, EVEN)  # tells Triton which loads may be wide and asynchronous
        words = positions.to(tl.pointer_type(tl.int16), bitcast=True)
        word = tl.load(words + row * quads + quad, mask=wanted & (quad < quads), other=0).to(tl.int32)
    else:
        stride = (groups + 1) // 2
        first = positions + row * stride + 2 * quad
        word = tl.load(first, mask=wanted & (2 * quad < stride), other=0).to(tl.int32)
        word |= tl.load(first + 1, mask=wanted & (2 * quad + 1 < stride), other=0).to(tl.int32) << 8
    return (word >> (4 * tl.arange(0, 4))[None, None, :]) & 15


@triton.jit
def load_four_words(address, inside, ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load 16 bytes, and with `ONCE` do not keep them in the first cache.

    Written in assembly, since Triton would make the threads exchange loaded words.
    """
    HINT: tl.constexpr = ".L1::no_allocate" if ONCE else ""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.nc" + HINT + ".v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=r,=r,=r,=r,l,r",
        [address.to(tl.int64), inside.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_two_words(address, inside):  # type: ignore[no-untyped-def]
    """Load 8 bytes that are used once."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
        "@p ld.global.nc.L1::no_allocate.v2.b32 {$0, $1}, [$2]; }",
        "=r,=r,l,r",
        [address.to(tl.int64), inside.to(tl.int32)],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def decode(code, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert the lowest byte of a word, an 8-bit value, or its lowest half, an int4, to fp32.

    A number of fp8 becomes one of fp16 that is 256 times smaller, which any GPU can convert.
    """
    if GRID == "int4":
        return ((code << 28) >> 28).to(tl.float32)
    elif GRID == "int8":
        return ((code << 24) >> 24).to(tl.float32)
    else:
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def load_four_bytes(address, inside):  # type: ignore[no-untyped-def]
    """Load a word that is used once."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.L1::no_allocate.b32 $0, [$1]; }",
        "=r,l,r",
        [address.to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_scale(scale, at, inside):  # type: ignore[no-untyped-def]
    """Load scales in fp32; those in bf16, of int4, come as their bits."""
    if scale.dtype.element_ty == tl.int16:
        bits = tl.load(scale + at, mask=inside, other=0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(scale + at, mask=inside, other=0.0)


@triton.jit
def load_word(address, inside):  # type: ignore[no-untyped-def]
    """Load two bytes that are used once."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.L1::no_allocate.u16 $0, [$1]; }",
        "=r,l,r",
        [address.to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def both_halves(pair, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the two 16-bit numbers of a word in fp32."""
    if dtype == tl.bfloat16:  # bf16 is the upper half of fp32
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = pair.to(tl.int16)
        high = (pair >> 16).to(tl.int16)
        return low.to(dtype, bitcast=True).to(tl.float32), high.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def product_of_group(low, high, x01, x23, half, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply two kept values with their two of four inputs, which one instruction picks, and add."""
    select = ((half | half << 6) & 0x0303) * 0x22 + 0x1010
    chosen = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x01, x23, select], dtype=tl.int32, is_pure=True, pack=1
    )
    x_low, x_high = both_halves(chosen, dtype)
    return low * x_low + high * x_high


@triton.jit
def choose_pair(four, half):  # type: ignore[no-untyped-def]
    """Pick the two kept of four 16-bit inputs in a 64-bit word, into a 32-bit word."""
    low = (four >> (half % 4 * 16).to(tl.int64)).to(tl.int32) & 0xFFFF
    return low | (four >> (half // 4 * 16).to(tl.int64)).to(tl.int32) << 16


@triton.jit
def spread_pair(pair, half, PRMT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Spread two kept 16-bit values of a 32-bit word over a 64-bit word, with zeros between."""
    low = half % 4
    high = half // 4
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
        first = (pair & 0xFFFF).to(tl.int64)
        second = ((pair >> 16) & 0xFFFF).to(tl.int64)
        return (first << (16 * low).to(tl.int64)) | (second << (16 * high).to(tl.int64))
