"""`sparseforge::experts24`, the products of a mixture's experts with their own rows, as an operator of torch.

The weights of all experts of a layer are one packed tensor. `linear24` multiplies those of experts that have rows, one
after the other; the rest is not read. The operator is opaque to torch.compile, as only run time knows who has rows. On
a GPU the host waits for that, so that it cannot be part of a captured graph; a few rows are one launch of the Triton
kernel, without a wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.mask.packing import unpack24
from sparseforge_ds.runtime.linear24 import TRITON_DTYPES, check_inputs, linear24, triton_kernels

_ON_THE_HOST = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("sparseforge::experts24", mutates_args=(), tags=_ON_THE_HOST)
def experts24(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    """`linear24` of each run of rows with the weight of its expert.

    Args:
        x: (rows, in), sorted by expert.
        values: (experts, out, in/2), the kept values, in the dtype of `x`.
        positions: (experts, out, ceil(in/8)), uint8, where they belong.
        ends: (experts,), integers: behind the last row of each expert.

    Returns:
        (rows, out) in the dtype of `x`; rows behind the last end are zero. Its gradient goes to `x`; a packed weight
        has none.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
    """
    _check(x, values, positions, ends)
    return _one_by_one(x, values, positions, ends)


@experts24.register_kernel("cuda")
def _on_gpu(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    _check(x, values, positions, ends)
    kernels = triton_kernels() if x.dtype in TRITON_DTYPES else None
    if kernels is None or len(x) > kernels.FEW_ROWS_OF_EXPERTS:
        return _one_by_one(x, values, positions, ends)
    result: Tensor = kernels.triton_experts24(x, values, positions, ends)
    return result


def _one_by_one(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    y = x.new_zeros(len(x), values.shape[1])
    for expert, run in _runs(ends):
        y[run] = linear24(x[run], values[expert], positions[expert])
    return y


def _runs(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and these."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _check(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor) -> None:
    if x.ndim != 2 or values.ndim != 3 or len(positions) != len(values) or ends.shape != values.shape[:1]:
        raise ValueError(
            f"experts24: x of shape {tuple(x.shape)}, values {tuple(values.shape)}, positions {tuple(positions.shape)} "
            f"and ends {tuple(ends.shape)} are not rows and the packed weights of as many experts"
        )
    check_inputs(x, values[0], positions[0], None)


@experts24.register_fake
def _(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    _check(x, values, positions, ends)
    return x.new_empty(len(x), values.shape[1])


@torch.library.custom_op("sparseforge::experts24_input_gradient", mutates_args=(), tags=_ON_THE_HOST)
def _input_gradient(gradient: Tensor, values: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    """(rows, out) -> (rows, in): what `experts24` sends back to its `x`, one expert unpacked at a time."""
    to_x = gradient.new_zeros(len(gradient), 2 * values.shape[2])
    for expert, run in _runs(ends):
        to_x[run] = gradient[run] @ unpack24(values[expert], positions[expert]).to(gradient.dtype)
    return to_x


@_input_gradient.register_fake
def _(gradient: Tensor, values: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    return gradient.new_empty(len(gradient), 2 * values.shape[2])


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, values, positions, ends = inputs
    if values.requires_grad:
        raise ValueError(
            "experts24: packed 2:4 experts cannot be trained; make the model dense by model.dequantize(), or train a "
            "low-rank adapter of its other layers"
        )
    ctx.save_for_backward(values, positions, ends)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return _input_gradient(gradient, *ctx.saved_tensors), None, None, None


experts24.register_autograd(_backward, setup_context=_keep_for_backward)
