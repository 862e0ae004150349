"""What is counted in one weight of a sparse model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseforge_ds.export.bits import chunk_size, count_not_finite, members_left, nonzero
from sparseforge_ds.mask.pattern import Pattern


@dataclass
class WeightReport:
    """What was found in one weight so far."""

    name: str
    shape: tuple[int, ...]
    groups: int = 0
    nonzeros: int = 0
    violations: int = 0
    """Groups with more than N members that are not zero."""
    negative_zeros: int = 0
    nonfinite: int = 0

    def add(self, chunk: Tensor, pattern: Pattern, input_axis: int) -> None:
        """Count (n,) consecutive elements, whole spans of the pattern, which fits the weight."""
        left, negative_zeros = nonzero(chunk)
        left_G = members_left(left, pattern, self.shape, input_axis)
        self.groups += left_G.numel()
        self.nonzeros += int(left_G.sum())
        self.violations += int((left_G > pattern.kept).sum())
        self.negative_zeros += negative_zeros
        self.nonfinite += count_not_finite(chunk)


def check_weight(weight: Tensor, name: str, pattern: Pattern, input_axis: int) -> WeightReport:
    """Count groups, non-zeros and what is wrong in one weight of the full shape, which the pattern fits."""
    report = WeightReport(name, tuple(weight.shape))
    for chunk in weight.reshape(-1).split(chunk_size(pattern.span(report.shape, input_axis))):
        report.add(chunk, pattern, input_axis)
    return report
