"""Programs of the Triton kernels that sum squared gradients per token of a linear layer, which `fisher` launches.

Pointers and strides have no annotation, since Triton reads annotations. T tokens, N features, in blocks of capitals.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _squares(values, stride, out, T, N, TOKENS: tl.constexpr, FEATURES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write |v_t|^2 of a block of tokens."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
    for begin in range(0, N, FEATURES):
        n = begin + tl.arange(0, FEATURES)
        inside = (t[:, None] < T) & (n[None, :] < N)
        element = t.to(tl.int64)[:, None] * stride + n[None, :]
        value = tl.load(values + element, mask=inside, other=0.0).to(tl.float32)
        total += value * value
    tl.store(out + t, tl.sum(total, axis=1), mask=t < T)


@triton.jit
def token_squares(  # type: ignore[no-untyped-def]
    first, second, first_stride, second_stride, out, T, N, M, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):
    """Write |v_t|^2 of `first`, (T, N), to out[0], and of `second`, (T, M), to out[1], if the grid has a second row."""
    if tl.program_id(1) == 0:
        _squares(first, first_stride, out, T, N, TOKENS, FEATURES)
    else:
        _squares(second, second_stride, out + T, T, M, TOKENS, FEATURES)


@triton.jit
def _add_columns(  # type: ignore[no-untyped-def]
    values, stride, scale, out, factor, block, T, N, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):
    """Add factor * sum_t v_tn^2 scale_t to a block of features, whose tokens no other program sums."""
    n = block * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
    for begin in range(0, T, TOKENS):
        t = begin + tl.arange(0, TOKENS)
        inside = (t[:, None] < T) & (n[None, :] < N)
        element = t.to(tl.int64)[:, None] * stride + n[None, :]
        value = tl.load(values + element, mask=inside, other=0.0).to(tl.float32)
        scale_T = tl.load(scale + t, mask=t < T, other=0.0)
        total += value * value * scale_T[:, None]
    before = tl.load(out + n, mask=n < N, other=0.0)
    tl.store(out + n, before + factor * tl.sum(total, axis=0).to(tl.float64), mask=n < N)


@triton.jit
def add_weighted_squares(  # type: ignore[no-untyped-def]
    grad,
    inputs,
    grad_stride,
    input_stride,
    grad_square,
    input_square,
    output_sums,
    input_sums,
    factor: tl.float64,
    T,
    N,
    M,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Add the sums of `fisher_sums`: of gradients, (T, N), by |x_t|^2, and of inputs, (T, M), by |g_t|^2."""
    block = tl.program_id(0)
    blocks_of_grad = tl.cdiv(N, FEATURES)
    if block < blocks_of_grad:
        _add_columns(grad, grad_stride, input_square, output_sums, factor, block, T, N, TOKENS, FEATURES)
    else:
        block -= blocks_of_grad
        _add_columns(inputs, input_stride, grad_square, input_sums, factor, block, T, M, TOKENS, FEATURES)
