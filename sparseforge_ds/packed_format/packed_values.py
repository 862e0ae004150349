"""Rounded values of packed 2:4 weights, to nearest on a symmetric grid; zero stays zero.

With 8 bits each row (the weights of one output) has an fp32 scale: its largest kept value becomes the largest of the
grid. With the positions a weight takes 5 bits. int4 has two codes a byte, the first in its lower half, and a bf16 scale
for a group of kept values or a row: 3.125 bits with groups of 64. Its codes and scales are those of
`mask.quantization`, so a run that was trained on them is stored as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseforge_ds.mask.quantization import SCALE_DTYPE, quantize

SCALE = "_scale"
"""Suffix of a packed weight's name: the tensor with its scales."""

PAIRS = torch.uint8
"""Dtype of stored int4 values, two in an element."""

GRIDS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "int4": PAIRS}
"""Dtypes of stored values, by the names that `--values` and config.json use."""

SCALE_DTYPES = {torch.int8: torch.float32, torch.float8_e4m3fn: torch.float32, PAIRS: SCALE_DTYPE}
"""Dtype of the scales of each grid. bf16 holds those of int4 exactly, in half the bytes."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, PAIRS: 7.0}
"""Largest value of each grid. -128 and -8 are no values of a symmetric one."""

DTYPE_NAMES = "int8 or float8_e4m3fn with scales in float32, or uint8 (two int4) with scales in bfloat16"

GROUP_UNIT = 16
"""Divisor of the values that share a scale, if not all of a row do: kernels take as many at once."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Grid(NamedTuple):
    """Form of rounded values."""

    name: str
    """A key of `GRIDS`."""
    group_size: int | None = None
    """Kept values that share a scale; None: all of a row."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of stored values."""
        return GRIDS[self.name]

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of scales."""
        return SCALE_DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name}, one scale {'a row' if self.group_size is None else f'for {self.group_size} kept values'}"


def values_per_element(dtype: torch.dtype | None) -> int:
    """Return the kept values in an element of a stored tensor: 2 of int4, else 1."""
    return 2 if dtype == PAIRS else 1


def dense_inputs(values: Tensor) -> int:
    """Return the inputs of a weight whose values lie along the last axis."""
    return 2 * values_per_element(values.dtype) * values.shape[-1]


def round_values(values: Tensor, input_axis: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """Round the kept values of a packed weight, ties to even.

    Args:
        values: kept values, (..., out, in/2) at `input_axis` -1, (..., in/2, out) at -2; any floating-point dtype.
        input_axis: axis of the inputs.
        grid: of the result.

    Returns:
        (values in the dtype of the grid, of int4 half as many on `input_axis`; scales, of the shape of `scale_shape`).
        Zeros that share a scale have 1.

    Raises:
        ValueError: a value is not finite, or groups do not divide the kept values.
    """
    exact = values.float()
    largest = exact.abs().amax(input_axis, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ValueError("a value is not finite, and no scale fits its row; export a sound model")
    if grid.dtype == PAIRS:
        rows = exact.transpose(-1, input_axis)
        size = rows.shape[-1] if grid.group_size is None else grid.group_size
        require_group_size(rows.shape[-1], size)
        code_GI, scale_G1 = quantize(rows.reshape(-1, size), bits=4)
        codes = code_GI.to(torch.int8).view(rows.shape).transpose(-1, input_axis)
        scale = scale_G1.to(SCALE_DTYPE).view(*rows.shape[:-1], -1).transpose(-1, input_axis)
        return pair_codes(codes, input_axis), scale.contiguous()
    scale = (largest / LARGEST[grid.dtype]).clamp(min=_SMALLEST_SCALE)
    scale = torch.where(largest > 0, scale, 1.0)

    # The quotient of the largest value may be off by an ulp.
    on_grid = (exact / scale).clamp(-LARGEST[grid.dtype], LARGEST[grid.dtype])
    if grid.dtype == torch.int8:
        return on_grid.round().to(grid.dtype), scale
    bits = on_grid.to(grid.dtype).view(torch.uint8)
    return bits.masked_fill(bits == 0x80, 0).view(grid.dtype), scale  # -0.0, which no pruned model has


def pair_codes(codes: Tensor, input_axis: int) -> Tensor:
    """Store int8 codes from -7 to 7 as int4, two in a byte, along `input_axis`."""
    half = codes.transpose(-1, input_axis).view(torch.uint8) & 15
    return (half[..., 0::2] | half[..., 1::2] << 4).transpose(-1, input_axis).contiguous()


def unpaired(values: Tensor, input_axis: int) -> Tensor:
    """Return stored values one in an element: of int4 as int8, others as they are."""
    if values.dtype != PAIRS:
        return values
    pair = values.transpose(-1, input_axis)
    half = torch.stack((pair & 15, pair >> 4), dim=-1).flatten(-2).view(torch.int8)
    return ((half ^ 8) - 8).transpose(-1, input_axis)


def require_grid(values: object, group_size: object = None) -> Grid | None:
    """Return the grid of a packed model's quantization_config, or None for floating-point values.

    Args:
        values: its `values`: a key of `GRIDS`, or None.
        group_size: its `group_size`: values that share a scale, or None.

    Raises:
        ValueError: they are neither.
    """
    if values is not None and (not isinstance(values, str) or values not in GRIDS):
        raise ValueError(
            f"quantization_config: values {values!r} is damaged or newer than this version of sparseforge_ds, which "
            f"reads {', '.join(GRIDS)}; upgrade it, or export again"
        )
    if group_size is not None and (
        values != "int4" or type(group_size) is not int or group_size < 1 or group_size % GROUP_UNIT
    ):
        raise ValueError(
            f"quantization_config: group_size {group_size!r} is damaged: with values int4 it is a multiple of "
            f"{GROUP_UNIT}, and else it is left out; export again"
        )
    return None if values is None else Grid(values, group_size)


def bits_a_weight(grid: Grid | None = None) -> float:
    """Return the bits that a packed 2:4 weight takes: half a value, a bit of position, and its share of a scale.

    Values without a grid have 16 bits. The scale of a whole row counts nothing.
    """
    if grid is None:
        return 16 / 2 + 1
    value_bits = 8 * grid.dtype.itemsize / values_per_element(grid.dtype)
    scale_bits = 0 if grid.group_size is None else 8 * grid.scale_dtype.itemsize / (2 * grid.group_size)
    return value_bits / 2 + 1 + scale_bits


def parse_grid(text: str) -> Grid:
    """Return the grid of `int4:64`, int4 with a scale for 64 kept values, or of `int8`, with one a row.

    Raises:
        ValueError: it is neither a name of `GRIDS` nor one with a group size.
    """
    name, separator, size = text.partition(":")
    if name not in GRIDS or (separator and not (name == "int4" and size.isdecimal() and 0 < int(size) < 2**31)):
        raise ValueError(
            f"{text!r} is no form of values; use {', '.join(GRIDS)}, or int4:N for groups of N kept values"
        )
    return Grid(name, int(size) if separator else None)


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype, input_axis: int) -> Tensor:
    """Return stored values times their scales, one in an element: a product in fp32, rounded once more to `dtype`."""
    exact = unpaired(values, input_axis).float()
    # In place, and by a view with an axis of groups, which spares a copy of the scales as large as the weight.
    axis = input_axis % exact.ndim
    in_groups = exact.unflatten(axis, (scale.shape[axis], -1))
    in_groups.mul_(scale.float().unsqueeze(axis + 1))
    return exact.to(dtype)


def require_group_size(kept_count: int, group_size: int) -> None:
    """Reject a number of values that share a scale unless it is the whole row, or kernels can take it."""
    if group_size != kept_count and (group_size < 1 or kept_count % group_size or group_size % GROUP_UNIT):
        raise ValueError(
            f"groups of {group_size} values do not divide the {kept_count} kept inputs of a row, or are no multiple of "
            f"{GROUP_UNIT}; use another size, or one scale a row"
        )


def scale_shape(values: tuple[int, ...], input_axis: int, grid: Grid) -> tuple[int, ...]:
    """Return the shape of the scales of stored values; ValueError if groups do not divide them."""
    shape = list(values)
    shape[input_axis] = 1
    if grid.group_size is not None:
        kept_count = values[input_axis] * values_per_element(grid.dtype)
        require_group_size(kept_count, grid.group_size)
        shape[input_axis] = kept_count // grid.group_size
    return tuple(shape)


def grid_of(dtype: torch.dtype, values: tuple[int, ...], scale: tuple[int, ...], input_axis: int) -> Grid:
    """Return the grid of stored values whose scales have the shape `scale`; a row's where that fits no group."""
    name = next(name for name, stored in GRIDS.items() if stored == dtype)
    groups = scale[input_axis] if len(scale) == len(values) else 1
    kept_count = values[input_axis] * values_per_element(dtype)
    is_grouped = dtype == PAIRS and groups > 1 and are_groups(kept_count, groups)
    return Grid(name, kept_count // groups if is_grouped else None)


def are_groups(kept_count: int, groups: int) -> bool:
    """Return True if `kept_count` values of a row may have as many scales of groups."""
    return groups > 0 and kept_count % groups == 0 and kept_count // groups % GROUP_UNIT == 0


def require_sound_values(values: Tensor, scale: Tensor) -> None:
    """Reject stored values off their grid, and scales that are not finite and positive.

    Raises:
        ValueError: the message names the first kind of damage.
    """
    bits = values.view(torch.uint8)
    if values.dtype == PAIRS:
        count = int((bits & 15 == 8).sum()) + int((bits >> 4 == 8).sum())
        kind = "-8"
    elif values.dtype == torch.int8:
        count = int((bits == 0x80).sum())
        kind = "-128"
    else:
        count = int(((bits & 0x7F) == 0x7F).sum())
        kind = "NaN"
    if count:
        raise ValueError(f"{count} values are damaged: {kind}")
    odd = ~((scale > 0) & scale.isfinite())
    if bool(odd.any()):
        raise ValueError(f"scales are positive and finite, and {int(odd.sum())} are not, first {scale[odd][0].item()}")
