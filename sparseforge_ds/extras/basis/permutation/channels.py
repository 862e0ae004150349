"""Channels of one model: the dimensions that can be reordered, and the axes of tensors that have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.extras.basis.permutation.channel_rows import ChannelAxis, Channels, Part
from sparseforge_ds.extras.basis.permutation.channel_table import CHANNELS

PARTS: dict[str, tuple[Part, ...]] = {
    "mlp": ("mlp",),
    "mlp+heads": ("mlp", "heads"),
    "all": ("mlp", "heads", "residual"),
}
"""Parts of a model that each value of a permutation's `dimensions` stands for."""


@dataclass(frozen=True)
class Axis:
    """Axis of a tensor along which the channels of a dimension lie."""

    tensor: str
    shape: tuple[int, ...]
    axis: int
    positions: Tensor
    """Positions along the axis (copies, blocks, channels), as in `layouts`."""
    block: int | None = None
    """Only block of the dimension that the tensor has, if an expert is stored by itself."""

    @property
    def length(self) -> int:
        """Number of positions along the axis, counted over all fused experts."""
        return self.shape[self.axis] * (self.shape[0] if len(self.shape) == 3 else 1)

    def order(self, index_BC: Tensor) -> Tensor:
        """Return the source position of every position along the axis, for an order as in `Permutation.index_BC`."""
        index_BC = index_BC if self.block is None else index_BC[self.block][None]
        order = torch.arange(self.length)
        order[self.positions] = self.positions.gather(-1, index_BC.expand_as(self.positions))
        return order

    def reorder(self, value: Tensor, index_BC: Tensor) -> Tensor:
        """Return a copy of the tensor with its channels in the given order."""
        order = self.order(index_BC).to(value.device)
        if value.dim() < 3:
            return value.index_select(self.axis, order)
        length = value.shape[self.axis]
        order_EL = order.view(-1, length) - length * torch.arange(len(value), device=value.device)[:, None]
        return value.gather(self.axis, order_EL.unsqueeze(-self.axis - 3).expand_as(value))


@dataclass(frozen=True)
class Dimension:
    """Channels that have one order in all their tensors; each of its blocks has an order of its own."""

    name: str
    part: Part
    blocks: int
    channels: int
    axes: list[Axis] = field(default_factory=list)


def check_family(model_type: str) -> None:
    """Raise ValueError for a family that the table does not have."""
    if model_type not in CHANNELS:
        raise ValueError(
            f"the channels of a {model_type!r} model are not known, so it can be neither permuted nor rotated; known "
            f'are {", ".join(CHANNELS)}. Add a line "{model_type}" to CHANNELS in '
            "sparseforge_ds/extras/basis/permutation/channel_table.py, or train the model as it is"
        )


def dimensions(
    model_type: str, config: Any, shapes: Mapping[str, tuple[int, ...]], selection: str
) -> dict[str, Dimension]:
    """Return the dimensions of a model that can be reordered, by name.

    Args:
        model_type: the family.
        config: transformers' config of the text model (`get_text_config`), for numbers and sizes of heads.
        shapes: full shape of every tensor, by its name in files or in memory.
        selection: the parts of the model, a key of `PARTS`.

    Raises:
        ValueError: the table does not have the family or one of the tensors, or shapes contradict each other.
    """
    check_family(model_type)
    family = CHANNELS[model_type]
    by_name: dict[str, Dimension] = {}
    for name, shape in shapes.items():
        # A tensor without a line may have channels that a reordering would miss.
        matches = [match for row in family.rows for match in _matching_axes(row, name)]
        if not matches and not any(_regex(glob).fullmatch(name) for glob in family.fixed):
            raise ValueError(
                f"{name} of shape {shape} has no line in the row {model_type!r} of "
                "sparseforge_ds/extras/basis/permutation/channel_table.py. Its channels are not known, so the model "
                "can be neither permuted nor rotated; add the line, or train the model as it is"
            )
        for dimension_name, part, channel_axis, block in matches:
            if part not in PARTS[selection]:
                continue
            positions = channel_axis.layout(config, shape, channel_axis.axis)
            if not len(positions):
                continue
            # 0 blocks: experts stored one by one, which are counted at the end.
            blocks = positions.shape[1] if block is None else 0
            channels = positions.shape[2]
            dimension = by_name.setdefault(dimension_name, Dimension(dimension_name, part, blocks, channels))
            if (dimension.blocks, dimension.channels) != (blocks, channels):
                raise ValueError(
                    f"{name} has {blocks or 1} x {channels} channels of {dimension_name}, others have "
                    f"{dimension.blocks or 1} x {dimension.channels}: config.json and weights do not belong together"
                )
            dimension.axes.append(Axis(name, tuple(shape), channel_axis.axis, positions, block))
    return {name: _with_counted_experts(dimension) for name, dimension in by_name.items()}


def _with_counted_experts(dimension: Dimension) -> Dimension:
    """Return the dimension with a block for every expert, if its experts are stored one by one."""
    if dimension.blocks:
        return dimension
    experts = 1 + max(axis.block for axis in dimension.axes if axis.block is not None)
    return Dimension(dimension.name, dimension.part, experts, dimension.channels, dimension.axes)


def _matching_axes(row: Channels, name: str) -> Iterator[tuple[str, Part, ChannelAxis, int | None]]:
    """Yield (dimension name, part, axis, block) for every axis of the row that the tensor `name` has."""
    for channel_axis in row.tensors:
        if (match := _regex(channel_axis.names).fullmatch(name)) is not None:
            numbers = match.groups()
            block = int(numbers[1]) if row.experts and len(numbers) > 1 else None
            yield row.name.replace("*", numbers[0] if numbers else ""), row.part, channel_axis, block


@cache
def _regex(glob: str) -> re.Pattern[str]:
    """Compile a glob of the table; a prefix that the surrounding model class adds to names has no numbers."""
    return re.compile(r"(?:[A-Za-z_]+\.)*?" + re.escape(glob).replace(r"\*", r"(\d+)"))
