"""Operator `sparseforge::experts24` of torch: the products of a mixture's experts with their own rows.

The weights of all experts of a layer are one packed tensor; experts without rows are not read. On a CPU `linear24`
multiplies one expert after the other. On a GPU one launch of the Triton kernel does all, without waiting on the host.
The operator is opaque to torch.compile, since the rows of an expert are known at run time only.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.extras.packed24.linear24 import TRITON_DTYPES, linear24, triton_kernels
from sparseforge_ds.extras.packed24.operands import require_ends, require_operands
from sparseforge_ds.packed_format.packed_values import dense_inputs
from sparseforge_ds.packed_format.packing import unpack24

_ON_THE_HOST = (torch.Tag.cudagraph_unsafe,)
"""Tag of an operator whose host waits for values of the GPU, so that no graph can capture it."""


@torch.library.custom_op("sparseforge::experts24", mutates_args=(), tags=() if find_spec("triton") else _ON_THE_HOST)
def experts24(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute `linear24` of each run of rows with the weight of its expert.

    Args:
        x: (rows, in), sorted by expert.
        values: (experts, out, in/2), the kept values, in the dtype of `x`; with `scale` int8 without -128, or
            float8_e4m3fn, or (experts, out, in/4) uint8, two int4 without -8.
        positions: (experts, out, ceil(in/8)), uint8, where they belong.
        ends: (experts,), int32 or int64, in order from 0 to the number of rows: behind the last row of each expert. A
            GPU does not look at their order; wrong ones give wrong numbers there, and touch no foreign memory.
        scale: (experts, out, 1), fp32, by which the sums of 8-bit values are multiplied; (experts, out, groups), bf16,
            by which int4 is; None for values without.

    Returns:
        (rows, out) in the dtype of `x`; rows behind the last end are zero. Its gradient goes to `x`; a packed weight
        has none.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together, or a dtype is none of a packed weight.
    """
    require_operands("experts24", x, values, positions, ends=ends, scale=scale)
    return _one_by_one(x, values, positions, ends, scale)


@experts24.register_kernel("cuda")
def experts24_on_gpu(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute `experts24` on NVIDIA's and AMD's GPUs, which are both "cuda" to torch."""
    require_operands("experts24", x, values, positions, ends=ends, scale=scale)
    kernels = triton_kernels() if x.dtype in TRITON_DTYPES else None
    if kernels is None:
        return _one_by_one(x, values, positions, ends, scale)
    result: Tensor = kernels.triton_experts24(x, values, positions, ends, scale)
    return result


def _one_by_one(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, scale: Tensor | None) -> Tensor:
    y = x.new_zeros(len(x), values.shape[1])
    for expert, run in _runs(ends, len(x)):
        of_expert = None if scale is None else scale[expert]
        y[run] = linear24(x[run], values[expert], positions[expert], scale=of_expert)
    return y


def _runs(ends: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, with the rows; raise ValueError for ends out of order."""
    stops = ends.tolist()
    require_ends(stops, rows)
    start = 0
    for expert, end in enumerate(stops):
        if end > start:
            yield expert, slice(start, end)
        start = end


@experts24.register_fake
def _(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, scale: Tensor | None = None) -> Tensor:
    require_operands("experts24", x, values, positions, ends=ends, scale=scale)
    return x.new_empty(x.shape[0], values.shape[1])  # `len` would bind a graph to this number of rows


@torch.library.custom_op("sparseforge::experts24_input_gradient", mutates_args=(), tags=_ON_THE_HOST)
def _input_gradient(
    gradient: Tensor, values: Tensor, positions: Tensor, ends: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Return the gradient (rows, in) of `experts24`'s x for that of its outputs, (rows, out), an expert at a time."""
    require_operands("experts24_input_gradient", gradient, values, positions, ends=ends, scale=scale, backward=True)
    to_x = gradient.new_zeros(len(gradient), dense_inputs(values))
    for expert, run in _runs(ends, len(gradient)):
        of_expert = None if scale is None else scale[expert]
        to_x[run] = gradient[run] @ unpack24(values[expert], positions[expert], of_expert, gradient.dtype)
    return to_x


@_input_gradient.register_fake
def _(gradient: Tensor, values: Tensor, positions: Tensor, ends: Tensor, scale: Tensor | None = None) -> Tensor:
    require_operands("experts24_input_gradient", gradient, values, positions, ends=ends, scale=scale, backward=True)
    return gradient.new_empty(gradient.shape[0], dense_inputs(values))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, values, positions, ends, scale = inputs
    if values.requires_grad or (scale is not None and scale.requires_grad):
        raise ValueError(
            "experts24: packed 2:4 experts cannot be trained; make the model dense by model.dequantize(), or train a "
            "low-rank adapter of its other layers"
        )
    ctx.save_for_backward(values, positions, ends, *(() if scale is None else (scale,)))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _input_gradient(gradient, *ctx.saved_tensors), None, None, None, None


experts24.register_autograd(_backward, setup_context=_keep_for_backward)


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices of all tokens by expert: each is a row of x.

    Args:
        chosen: (tokens, k) integers, the experts of each token. Rows of numbers outside of 0 to `experts` - 1 have no
            expert, and come last.
        experts: number of experts.

    Returns:
        The expert of each row, (tokens * k,), in order; the choice of each row, `token * k + number`; and the ends for
        `experts24`, (experts,).
    """
    everyone = chosen.reshape(-1)
    everyone = everyone.masked_fill((everyone < 0) | (everyone >= experts), experts)
    of_rows, order = torch.sort(everyone)
    numbers = torch.arange(experts, device=of_rows.device, dtype=of_rows.dtype)
    return of_rows, order, torch.searchsorted(of_rows, numbers, right=True)


def add_choices(y: Tensor, order: Tensor, shares: Tensor) -> Tensor:
    """Sum the outputs of each token's experts, weighted by their shares.

    Args:
        y: (tokens * k, out), in the order of `sort_by_expert`.
        order: the choice of each row.
        shares: (tokens, k) routing weights.

    Returns:
        (tokens, out).
    """
    weighted = (y * shares.reshape(-1)[order, None])[torch.argsort(order)]
    return weighted.view(*shares.shape, -1).sum(1)
