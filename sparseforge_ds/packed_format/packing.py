"""2:4 weights in few bits: kept values and their 2-bit positions, from the lowest bit of a byte on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseforge_ds.packed_format.packed_values import (
    DTYPE_NAMES,
    GROUP_UNIT,
    PAIRS,
    SCALE_DTYPES,
    Grid,
    grid_of,
    require_sound_values,
    scale_shape,
    scaled,
    values_per_element,
)

PACKED24 = "sparseforge_packed24"
"""Name of the storage of `pack24` in config.json: its `quant_method`."""

PACKED24_MODULE = "sparseforge_ds.extras.packed24"
"""Module whose import registers that storage with `from_pretrained` of transformers."""

PACKED24_FORMAT = 1
"""Version of that storage."""

POSITIONS = "_positions"
"""Suffix of a weight's name for the tensor with its positions; the values have the name itself."""

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of kept values, by safetensors' names. All operators and kernels know these, and no others."""
VALUE_DTYPES = frozenset(STORED_DTYPES.values())
VALUE_DTYPE_NAMES = "float64, float32, bfloat16 or float16"
STORED_GRIDS = {"int8": "I8", "fp8_e4m3": "F8_E4M3", "int4": "U8"}
"""Names that safetensors has for the dtypes of `GRIDS`."""
STORED_SCALES = {"int8": "F32", "fp8_e4m3": "F32", "int4": "BF16"}
"""Names that it has for those of their scales."""


def require_packed_dtypes(values: torch.dtype, positions: torch.dtype, scale: torch.dtype | None = None) -> None:
    """Reject dtypes that no packed weight has. `scale` is None for values without scales, which are floating point."""
    if scale is None and values not in VALUE_DTYPES:
        raise ValueError(f"values of a packed weight are {VALUE_DTYPE_NAMES}, these are {values}")
    if scale is not None and SCALE_DTYPES.get(values) != scale:
        raise ValueError(f"values are {DTYPE_NAMES}; these are {values}, {scale}")
    if positions != torch.uint8:
        raise ValueError(f"positions of a packed weight are uint8, these are {positions}")


def require_stored_dtypes(
    name: str, values: str, positions: str | None, scale: str | None = None, grid: Grid | None = None
) -> None:
    """Reject dtypes in the header of a packed model's file, which loaders would cast silently.

    Args:
        name: name of the weight, for messages.
        values: dtype of the values, like the next two by safetensors' name.
        positions: dtype of the positions; None for a weight without.
        scale: dtype of the scales; None for a weight without.
        grid: of the model's quantization_config; None for floating-point values.

    Raises:
        ValueError: a dtype is not the one that a packed model has there.
    """
    is_rounded = grid is not None and positions is not None
    known = STORED_GRIDS[grid.name] if grid is not None and is_rounded else "F64, F32, BF16 or F16"
    model = f"a packed model of {grid.name} values" if grid is not None and is_rounded else "a packed model"
    if values not in known.replace(" or", ",").split(", "):
        kind = "weight"
        stored = values
    elif positions not in (None, "U8"):
        kind = "positions"
        stored = positions
        known = "U8"
    elif grid is not None and is_rounded and scale != STORED_SCALES[grid.name]:
        kind = "scales"
        stored = str(scale)
        known = STORED_SCALES[grid.name]
    else:
        return
    raise ValueError(f"{name}: {kind} stored as {stored}, in {model} only {known}; export or download it again")


def pack24(weight: Tensor, input_axis: int) -> tuple[Tensor, Tensor]:
    """Pack a weight that is 2:4 along `input_axis` into kept values and positions.

    A group with fewer than two elements that are not +0.0 is filled up with +0.0 at its first free positions. -0.0
    counts as an element to keep, so unpacking restores every bit.

    Args:
        weight: (..., out, in) at `input_axis` -1, (..., in, out) at -2; in is a multiple of 4.
        input_axis: -1 or -2, the axis of inputs.

    Returns:
        (values, positions): values with in/2 where `weight` has in, in its dtype; positions uint8 with ceil(in/8)
        there. A group is four bits, the lower position in the lower two; its even group is in the lower half of a byte.

    Raises:
        ValueError: a group has more than two, or the dtype is none of `VALUE_DTYPES`.
    """
    require_packed_dtypes(weight.dtype, torch.uint8)
    rows = weight.transpose(-1, input_axis)
    group = rows.reshape(*rows.shape[:-1], rows.shape[-1] // 4, 4)
    # Four bits for each group's positions, by which of its elements are not +0.0.
    nonzero = group.view(_INTEGER[group.element_size()]) != 0
    half = _HALVES.to(weight.device)[_nibble(nonzero)]
    if bool((half == _FULL).any()):
        raise ValueError(f"{int((half == _FULL).sum())} groups of four have more than two non-zeros; not a 2:4 weight")
    # The two values of each group, and two groups' positions in a byte.
    position = torch.stack((half & 3, half >> 2), dim=-1).long()
    values = group.gather(-1, position).reshape(*rows.shape[:-1], rows.shape[-1] // 2)
    half = torch.nn.functional.pad(half, (0, half.shape[-1] % 2))
    positions = half[..., 0::2] | half[..., 1::2] << 4
    return values.transpose(-1, input_axis).contiguous(), positions.transpose(-1, input_axis).contiguous()


def unpack24(
    values: Tensor, positions: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Unpack a weight of `pack24`; the input axis is the one on which the shapes differ.

    Args:
        values: kept values; with `scale` rounded ones.
        positions: their positions.
        scale: of `round_values`; or None.
        dtype: dtype of the result, if there is a scale.

    Raises:
        ValueError: the tensors do not belong together, their dtypes are none of a packed weight, a group's positions
            are not two different ones in order, or rounded values or scales are damaged.
    """
    input_axis, inside = _checked(values, positions, scale)
    if scale is not None:
        values = scaled(values, scale, dtype, input_axis)
    rows = values.transpose(-1, input_axis)
    groups = rows.shape[-1] // 2
    group = torch.zeros((*rows.shape[:-1], groups, 4), dtype=values.dtype, device=values.device)
    group.scatter_(-1, inside.long(), rows.reshape(*rows.shape[:-1], groups, 2))
    return group.reshape(*rows.shape[:-1], groups * 4).transpose(-1, input_axis).contiguous()


def check24(values: Tensor, positions: Tensor, scale: Tensor | None = None) -> None:
    """Raise the errors of `unpack24` and `require_finite`, for tensors that stay packed."""
    _checked(values, positions, scale)
    require_finite(values, scale)


def require_finite(values: Tensor, scale: Tensor | None) -> None:
    """Raise ValueError for floating-point values that are not finite: no export writes them."""
    if scale is None and not bool(values.isfinite().all()):
        raise ValueError(f"{int((~values.isfinite()).sum())} values are damaged: not finite")


def _checked(values: Tensor, positions: Tensor, scale: Tensor | None) -> tuple[int, Tensor]:
    """Check a packed weight, and return its input axis and the positions with that axis last, (..., groups, 2)."""
    require_packed_dtypes(values.dtype, positions.dtype, None if scale is None else scale.dtype)
    input_axis = packed24_axis(tuple(values.shape), tuple(positions.shape), values.dtype)
    if scale is not None:
        shapes = (tuple(values.shape), tuple(scale.shape))
        require_scale_shape(*shapes, input_axis, grid_of(values.dtype, *shapes, input_axis))
        require_sound_values(values, scale)
    byte = positions.transpose(-1, input_axis)
    groups = values.shape[input_axis] * values_per_element(values.dtype) // 2
    half = torch.stack((byte & 15, byte >> 4), dim=-1).reshape(*byte.shape[:-1], -1)
    position = torch.stack((half & 3, half >> 2), dim=-1)
    inside = position[..., :groups, :]
    if bool((inside[..., 0] >= inside[..., 1]).any()) or bool(half[..., groups:].any()):
        raise ValueError("positions of a packed weight are damaged: a group does not name two elements in order")
    return input_axis, inside


def packed24_shapes(
    shape: tuple[int, ...], input_axis: int, dtype: torch.dtype | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of (values, positions) of a weight of `shape`; `dtype` matters where it is that of int4."""
    values = list(shape)
    positions = list(shape)
    values[input_axis] //= 2 * values_per_element(dtype)
    positions[input_axis] = -(-positions[input_axis] // 8)
    return tuple(values), tuple(positions)


def packed24_axis(values: tuple[int, ...], positions: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
    """Return the input axis of a packed weight.

    in/2 and ceil(in/8) differ for every in. in/4 of int4 differs but for four inputs, which are the last axis unless
    the other one alone fits.

    Args:
        values: shape of the values.
        positions: shape of the positions.
        dtype: of the values; it matters where it is that of int4.

    Raises:
        ValueError: the shapes do not belong together.
    """
    for axis in (-1, -2):
        if len(values) >= 2 and (values[axis] % 2 == 0 or dtype == PAIRS) and values[axis] > 0:
            shape = [*values]
            shape[axis] *= 2 * values_per_element(dtype)
            if packed24_shapes(tuple(shape), axis, dtype) == (values, positions):
                return axis
    raise ValueError(f"values of shape {values} and positions of shape {positions} are no packed 2:4 weight")


def has_packed_weights(module: nn.Module) -> bool:
    """Return True if a module itself holds packed 2:4 weights, and not just a buffer of that name like GPT-J's."""
    ends = [name for name, _ in module.named_buffers(recurse=False) if name.endswith(POSITIONS)]
    return any(isinstance(getattr(module, name.removesuffix(POSITIONS), None), Tensor) for name in ends)


def require_scale_shape(values: tuple[int, ...], scale: tuple[int, ...], input_axis: int, grid: Grid) -> None:
    """Reject scales of another shape than those of the packed values."""
    if scale != (expected := scale_shape(values, input_axis, grid)):
        kind = "a row" if grid.group_size is None else f"for {grid.group_size}"
        groups = f", or one for a multiple of {GROUP_UNIT}" if grid == Grid("int4") else ""
        raise ValueError(
            f"scales of shape {scale} do not fit values of shape {values}, one {kind} is {expected}{groups}"
        )


_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _nibble(bits: Tensor) -> Tensor:
    """Return the number with the given bits (..., 4), lowest first, as an index (...)."""
    bit = bits.view(torch.uint8)
    return (bit[..., 0] | bit[..., 1] << 1 | bit[..., 2] << 2 | bit[..., 3] << 3).long()


def _half(nonzero: int) -> int:
    """Return the four bits of positions for a group whose non-zeros are the set bits of `nonzero`."""
    kept = [member for member in range(4) if nonzero >> member & 1]
    if len(kept) > 2:
        return _FULL
    kept += [member for member in range(4) if member not in kept]
    low, high = sorted(kept[:2])
    return low | high << 2


_FULL = 255
_HALVES = torch.tensor([_half(nonzero) for nonzero in range(16)], dtype=torch.uint8)
