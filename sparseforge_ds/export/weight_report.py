"""What is counted in one weight of a sparse model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseforge_ds.export.bits import count_not_finite, members_left, nonzero, piece_size
from sparseforge_ds.mask.pattern import Pattern


@dataclass(frozen=True)
class WeightReport:
    """What was found in one weight."""

    name: str
    shape: tuple[int, ...]
    groups: int
    nonzeros: int
    violations: int
    """Groups with more than N members that are not zero."""
    negative_zeros: int
    nonfinite: int


class Counter:
    """Counts in a weight that comes in pieces, each of whole spans of the pattern, which fits it."""

    def __init__(self, name: str, shape: tuple[int, ...], pattern: Pattern, input_axis: int) -> None:
        self.report = WeightReport(name, shape, 0, 0, 0, 0, 0)
        """Of the pieces so far."""
        self._pattern = pattern
        self._input_axis = input_axis

    def add(self, piece: Tensor) -> None:
        """Count (n,) consecutive elements."""
        old, pattern = self.report, self._pattern
        left, negative_zeros = nonzero(piece)
        left_G = members_left(left, pattern, old.shape, self._input_axis)
        self.report = WeightReport(
            name=old.name,
            shape=old.shape,
            groups=old.groups + left_G.numel(),
            nonzeros=old.nonzeros + int(left_G.sum()),
            violations=old.violations + int((left_G > pattern.kept).sum()),
            negative_zeros=old.negative_zeros + negative_zeros,
            nonfinite=old.nonfinite + count_not_finite(piece),
        )


def check_weight(weight: Tensor, name: str, pattern: Pattern, input_axis: int) -> WeightReport:
    """Count groups, non-zeros and what is wrong in one weight of the full shape, which the pattern fits."""
    shape = tuple(weight.shape)
    counter = Counter(name, shape, pattern, input_axis)
    for piece in weight.reshape(-1).split(piece_size(pattern.span(shape, input_axis))):
        counter.add(piece)
    return counter.report
