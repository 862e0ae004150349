"""Check of the operands of all operators on packed 2:4 weights, before anything touches memory.

The C++ kernel has the same conditions in a few comparisons of its own, and calls this check for the message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.packed_format.packed_values import (
    DTYPE_NAMES,
    PAIRS,
    SCALE_DTYPES,
    are_groups,
    grid_of,
    values_per_element,
)
from sparseforge_ds.packed_format.packing import VALUE_DTYPE_NAMES, VALUE_DTYPES, require_scale_shape

_INTEGERS = frozenset({torch.int32, torch.int64})


def require_operands(
    operator: str,
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
    ends: Tensor | None = None,
    scale: Tensor | None = None,
    backward: bool = False,
) -> None:
    """Reject arguments of an operator that do not belong together, by shapes, dtypes, layouts and devices alone.

    Args:
        operator: its name, for messages.
        x: (..., in), or (..., out) if `backward`; with `ends` exactly two axes.
        values: (out, in/2), or of int4 (out, in/4); with `ends` (experts, ...).
        positions: (out, ceil(in/8)), uint8; with `ends` (experts, out, ceil(in/8)).
        bias: (out,), or None.
        ends: (experts,), int32 or int64, of an operator on experts; None for one weight.
        scale: (out, 1), fp32, of 8-bit values, or (out, groups), bf16, of int4; with `ends` (experts, ...). None for
            values in the dtype of `x`.
        backward: `x` is the gradient of the outputs.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    # Hot path: every decoded token passes here once a layer. Only a failure pays for its message.
    dtype = x.dtype
    device = x.device
    shape = values.shape
    axes = 2 if ends is None else 3
    if len(shape) == axes:
        outputs, kept_count = shape[-2:]
        if scale is not None and values.dtype == PAIRS:
            kept_count *= 2
        if (
            kept_count > 0
            and kept_count % 2 == 0
            and positions.shape == (*shape[:-1], (kept_count + 3) // 4)
            and x.ndim > 0
            and x.shape[-1] == (outputs if backward else 2 * kept_count)
            and dtype in VALUE_DTYPES
            and (values.dtype == dtype if scale is None else _is_scale(scale, values, kept_count))
            and positions.dtype == torch.uint8
            and values.device == device
            and positions.device == device
            and x.layout == values.layout == positions.layout == torch.strided
            and (bias is None or _is_bias(bias, outputs, x))
            and (ends is None or (x.ndim == 2 and _are_ends(ends, shape[0], x)))
        ):
            return
    raise ValueError(f"{operator}: {_misfit(x, values, positions, bias, ends, scale, backward)}")


def require_ends(ends: list[int], rows: int) -> None:
    """Reject ends of experts' rows that leave the rows or go back."""
    if any(end < start for start, end in zip([0, *ends], [*ends, rows], strict=True)):
        raise ValueError(f"experts24: ends {ends} are not in order between 0 and the {rows} rows of x")


def _is_scale(scale: Tensor, values: Tensor, kept_count: int) -> bool:
    dtype = values.dtype
    same = scale.dtype == SCALE_DTYPES.get(dtype) and scale.device == values.device
    shape = scale.shape
    if not same or scale.layout != torch.strided or shape[:-1] != values.shape[:-1]:
        return False
    groups = shape[-1]
    return groups == 1 or (dtype == PAIRS and are_groups(kept_count, groups))


def _scale_misfit(scale: Tensor, values: Tensor) -> str | None:
    """Return what is wrong with the shape of scales, or None."""
    try:
        shapes = (tuple(values.shape), tuple(scale.shape))
        require_scale_shape(*shapes, -1, grid_of(values.dtype, *shapes, -1))
    except ValueError as error:
        return str(error)
    return None


def _is_bias(bias: Tensor, outputs: int, x: Tensor) -> bool:
    same = bias.dtype == x.dtype and bias.device == x.device and bias.layout == torch.strided
    return same and bias.shape == (outputs,)


def _are_ends(ends: Tensor, experts: int, x: Tensor) -> bool:
    indexes = ends.dtype in _INTEGERS and ends.device == x.device and ends.layout == torch.strided
    return indexes and experts > 0 and ends.shape == (experts,)


def _misfit(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    scale: Tensor | None,
    backward: bool,
) -> str:
    """Return the first reason why arguments do not belong together."""
    operands = {"x": x, "values": values, "positions": positions, "bias": bias, "ends": ends, "scale": scale}
    tensors = {name: tensor for name, tensor in operands.items() if tensor is not None}
    shape = tuple(values.shape)
    if scale is not None and SCALE_DTYPES.get(values.dtype) != scale.dtype:
        return f"values are {DTYPE_NAMES}; these are {values.dtype}, {scale.dtype}"
    per_element = 1 if scale is None else values_per_element(values.dtype)
    kept_count = per_element * shape[-1] if shape else 0
    axes = 2 if ends is None else 3

    # Numbers of axes and their lengths.
    if ends is not None and (
        x.ndim != 2 or values.ndim != 3 or positions.shape[:1] != shape[:1] or ends.shape != shape[:1] or 0 in shape[:1]
    ):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        return f"{shapes} are not rows and the packed weights of as many experts"
    if (
        values.ndim != axes
        or kept_count % 2
        or not kept_count
        or positions.shape != (*shape[:-1], (kept_count + 3) // 4)
    ):
        return (
            f"values of shape {shape} and positions of shape {tuple(positions.shape)} are no weight that is packed "
            "along its last axis"
        )
    if scale is not None and (misfit := _scale_misfit(scale, values)) is not None:
        return misfit

    # Dtypes, layouts and devices.
    if positions.dtype != torch.uint8:
        return f"positions are uint8, these are {positions.dtype}"
    if ends is not None and ends.dtype not in _INTEGERS:
        return f"ends are int32 or int64, these are {ends.dtype}"
    other = ("positions", "ends", "scale") if scale is None else ("positions", "ends", "scale", "values")
    numbers = {name: tensor for name, tensor in tensors.items() if name not in other}
    for name, tensor in numbers.items():
        if tensor.dtype not in VALUE_DTYPES:
            return f"{name} is {tensor.dtype}; packed weights and what they multiply are {VALUE_DTYPE_NAMES}"
    if len({tensor.dtype for tensor in numbers.values()}) > 1:
        return f"dtypes differ: {', '.join(f'{name} {tensor.dtype}' for name, tensor in numbers.items())}"
    if odd := [f"{name} {tensor.layout}" for name, tensor in tensors.items() if tensor.layout != torch.strided]:
        return f"operands are dense tensors, here: {', '.join(odd)}"
    if len({tensor.device for tensor in tensors.values()}) > 1:
        return f"devices differ: {', '.join(f'{name} {tensor.device}' for name, tensor in tensors.items())}"

    # The lengths of x and the bias.
    along, count = ("outputs", shape[-2]) if backward else ("inputs", 2 * kept_count)
    if x.ndim == 0 or x.shape[-1] != count:
        return f"x of shape {tuple(x.shape)} does not end in the weight's {count} {along}"
    return f"bias of shape {tuple(bias.shape) if bias is not None else ()} does not fit {shape[-2]} outputs"
