"""8-bit values of packed 2:4 weights: rounded to nearest on a symmetric grid, one fp32 scale a row.

A row is the weights of one output. Its largest kept value becomes the largest of the grid, so that no value is cut off,
and zero stays zero. With the positions a weight takes 5 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = "_scale"
"""Suffix of a packed weight's name: the tensor with its scales, of the weight's shape with a single input."""

GRIDS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
"""Dtypes of 8-bit values, by the names that `--values` and config.json use."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest value of each grid. -128 is no value of a symmetric one."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def round_values(values: Tensor, input_axis: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round the kept values of a packed weight to 8 bits, ties to even.

    Args:
        values: kept values, (..., out, in/2) at `input_axis` -1, (..., in/2, out) at -2; any floating-point dtype.
        input_axis: axis of the inputs.
        dtype: a dtype of `GRIDS`.

    Returns:
        (values in `dtype`, scales in fp32 with 1 on `input_axis`). A row of zeros has the scale 1.

    Raises:
        ValueError: a value is not finite.
    """
    exact = values.float()
    largest = exact.abs().amax(input_axis, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ValueError("a value is not finite, and no scale fits its row; export a sound model")
    scale = (largest / LARGEST[dtype]).clamp(min=_SMALLEST_SCALE)
    scale = torch.where(largest > 0, scale, 1.0)

    # The quotient of the largest value may be off by an ulp.
    on_grid = (exact / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        return on_grid.round().to(dtype), scale
    bits = on_grid.to(dtype).view(torch.uint8)
    return bits.masked_fill(bits == 0x80, 0).view(dtype), scale  # -0.0, which no pruned model has


def require_grid(values: object) -> str | None:
    """Return `values` of a packed model's quantization_config: a key of `GRIDS`, or None for floating-point values.

    Raises:
        ValueError: it is neither.
    """
    if values is not None and (not isinstance(values, str) or values not in GRIDS):
        raise ValueError(
            f"quantization_config: values {values!r} is damaged or newer than this version of sparseforge_ds, which "
            f"reads {' and '.join(GRIDS)}; upgrade it, or export again"
        )
    return values


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 8-bit values times their scales: a product in fp32, rounded once more to `dtype`."""
    return (values.float() * scale).to(dtype)


def scale_shape(values: tuple[int, ...], input_axis: int) -> tuple[int, ...]:
    """Return the shape of the scales of packed values."""
    shape = list(values)
    shape[input_axis] = 1
    return tuple(shape)


def require_sound_values(values: Tensor, scale: Tensor) -> None:
    """Reject 8-bit values off their grid, and scales that are not finite and positive.

    Raises:
        ValueError: the message names the first kind of damage.
    """
    bits = values.view(torch.uint8)
    off_grid = bits == 0x80 if values.dtype == torch.int8 else (bits & 0x7F) == 0x7F
    if bool(off_grid.any()):
        raise ValueError(f"{int(off_grid.sum())} values are damaged: {'-128' if values.dtype == torch.int8 else 'NaN'}")
    odd = ~((scale > 0) & scale.isfinite())
    if bool(odd.any()):
        raise ValueError(f"scales are positive and finite, and {int(odd.sum())} are not, first {scale[odd][0].item()}")
