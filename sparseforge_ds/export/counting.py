"""Counting in weights, in chunks that stay in the processor's cache and on their integer bits, which is several times
faster than on floating-point values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseforge_ds.mask.pattern import Pattern

CHUNK = 1 << 18
"""Elements that are looked at together."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The smallest magnitude, as bits, that is not finite: infinity, or NaN where there is no infinity.
_NOT_FINITE = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0x7F800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


def chunk_size(span: int) -> int:
    """About `CHUNK` elements, of whole spans."""
    return max(span, CHUNK // max(1, span) * span)


def chunks(numel: int, span: int) -> Iterator[tuple[int, int]]:
    """Start and stop of chunks of `chunk_size` elements."""
    size = chunk_size(span)
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


def count_not_finite(tensor: Tensor) -> int:
    """Infinities and NaN in a tensor of any dtype."""
    if tensor.dtype not in _NOT_FINITE:
        return 0
    bits, first = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()]), _NOT_FINITE[tensor.dtype]
    total = 0
    for start, stop in chunks(bits.numel(), 1):
        magnitude = bits[start:stop] & torch.iinfo(bits.dtype).max
        if int(magnitude.max()) >= first:
            total += int((magnitude >= first).sum())
    return total


def nonzero(flat: Tensor) -> tuple[Tensor, int]:
    """Which elements are not zero, (n,) bool, and how many are -0.0 (which is zero)."""
    if flat.dtype not in _NOT_FINITE:
        return flat != 0, 0
    bits = flat.view(_INTEGERS[flat.element_size()])
    negative_zero = torch.iinfo(bits.dtype).min  # only the sign bit
    if not bits.numel() or int(bits.min()) != negative_zero:
        return bits != 0, 0
    negative = bits == negative_zero
    return (bits != 0) & ~negative, int(negative.sum())


def members_left(left: Tensor, pattern: Pattern, shape: tuple[int, ...], input_axis: int) -> Tensor:
    """(G,) how many members of each group are True, of (n,) bool in whole spans of a weight of `shape`."""
    return pattern.to_groups(left.view(torch.uint8), shape, input_axis).sum(1)


@dataclass
class WeightReport:
    """What was counted in one weight of a sparse model so far."""

    name: str
    shape: tuple[int, ...]
    input_axis: int
    groups: int = 0
    nonzeros: int = 0
    violations: int = 0
    """Groups with more than N members that are not zero."""
    negative_zeros: int = 0
    nonfinite: int = 0

    def add(self, chunk: Tensor, pattern: Pattern) -> None:
        """Count (n,) consecutive elements, whole spans of the pattern, which fits the weight."""
        left, negative_zeros = nonzero(chunk)
        left_G = members_left(left, pattern, self.shape, self.input_axis)
        self.groups += left_G.numel()
        self.nonzeros += int(left_G.sum())
        self.violations += int((left_G > pattern.kept).sum())
        self.negative_zeros += negative_zeros
        self.nonfinite += count_not_finite(chunk)
