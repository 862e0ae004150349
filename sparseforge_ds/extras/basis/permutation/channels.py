"""The channels of one model: which dimensions can be reordered, and where the tensors are that have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.extras.basis.permutation.channel_rows import Along, Channels, Part
from sparseforge_ds.extras.basis.permutation.channel_table import CHANNELS

PARTS: dict[str, tuple[Part, ...]] = {
    "mlp": ("mlp",),
    "mlp+heads": ("mlp", "heads"),
    "all": ("mlp", "heads", "residual"),
}
"""What `dimensions` of a permutation stands for."""


@dataclass(frozen=True)
class Axis:
    """An axis of a tensor that has the channels of a dimension."""

    tensor: str
    shape: tuple[int, ...]
    axis: int
    positions: Tensor
    """(copies, blocks, channels), as in `layouts`."""
    block: int | None = None
    """The only block of the dimension that the tensor has: an expert that is stored by itself."""

    @property
    def length(self) -> int:
        """Positions along the axis, of fused experts all together."""
        return self.shape[self.axis] * (self.shape[0] if len(self.shape) == 3 else 1)

    def order(self, index_BC: Tensor) -> Tensor:
        """For every position along the axis the one that comes there, by (blocks, channels) as in `Permutation`."""
        index_BC = index_BC if self.block is None else index_BC[self.block][None]
        order = torch.arange(self.length)
        order[self.positions] = self.positions.gather(-1, index_BC.expand_as(self.positions))
        return order

    def reorder(self, value: Tensor, index_BC: Tensor) -> Tensor:
        """The tensor with its channels in another order, in memory of its own."""
        order = self.order(index_BC).to(value.device)
        if value.dim() < 3:
            return value.index_select(self.axis, order)
        length = value.shape[self.axis]
        order_EL = order.view(-1, length) - length * torch.arange(len(value), device=value.device)[:, None]
        return value.gather(self.axis, order_EL.unsqueeze(-self.axis - 3).expand_as(value))


@dataclass(frozen=True)
class Dimension:
    """Channels that have one order wherever they are; in several blocks, each with an order of its own."""

    name: str
    part: Part
    blocks: int
    channels: int
    axes: list[Axis] = field(default_factory=list)


def check_family(model_type: str) -> None:
    """Raise ValueError where the table does not know a family."""
    if model_type not in CHANNELS:
        raise ValueError(
            f"the channels of a {model_type!r} model are not known, so that it is neither permuted nor rotated; known "
            f'are {", ".join(CHANNELS)}. Add a line "{model_type}" to CHANNELS in '
            "sparseforge_ds/extras/basis/permutation/channel_table.py, or train the model as it is"
        )


def dimensions(model_type: str, config: Any, shapes: Mapping[str, tuple[int, ...]], which: str) -> dict[str, Dimension]:
    """The dimensions of a model that can be reordered, by name.

    Raises ValueError where the table does not know the family, or one of the tensors; or shapes do not belong together.

    Args:
        config: of the text model (`get_text_config`): numbers and sizes of heads.
        shapes: full shape of every tensor, by its name in files or in memory.
    """
    check_family(model_type)
    family, found = CHANNELS[model_type], dict[str, Dimension]()
    for name, shape in shapes.items():
        places = [place for row in family.rows for place in _places(row, name)]
        if not places and not any(_regex(glob).fullmatch(name) for glob in family.others):
            raise ValueError(
                f"{name} of shape {shape} has no line in the row {model_type!r} of "
                "sparseforge_ds/extras/basis/permutation/channel_table.py, so that its channels are not known and the "
                "model is neither permuted nor rotated; add it there, or train the model as it is"
            )
        for dimension, part, along, block in places:
            if part not in PARTS[which]:
                continue
            positions = along.layout(config, shape, along.axis)
            if not len(positions):
                continue
            blocks, channels = (positions.shape[1] if block is None else 0), positions.shape[2]
            held = found.setdefault(dimension, Dimension(dimension, part, blocks, channels))
            if (held.blocks, held.channels) != (blocks, channels):
                raise ValueError(
                    f"{name} has {blocks or 1} x {channels} channels of {dimension}, others have "
                    f"{held.blocks or 1} x {held.channels}: config.json and weights do not belong together"
                )
            held.axes.append(Axis(name, tuple(shape), along.axis, positions, block))
    return {name: _with_experts(held) for name, held in found.items()}


def _with_experts(held: Dimension) -> Dimension:
    """Where experts are stored one by one, how many there are is known when all were seen."""
    if held.blocks:
        return held
    experts = 1 + max(axis.block for axis in held.axes if axis.block is not None)
    return Dimension(held.name, held.part, experts, held.channels, held.axes)


def _places(row: Channels, name: str) -> Iterator[tuple[str, Part, Along, int | None]]:
    """(dimension, part, line of the table, block) of every axis that the row names a tensor for."""
    for along in row.tensors:
        if (match := _regex(along.names).fullmatch(name)) is not None:
            numbers = match.groups()
            block = int(numbers[1]) if row.experts and len(numbers) > 1 else None
            yield row.name.replace("*", numbers[0] if numbers else ""), row.part, along, block


@cache
def _regex(glob: str) -> re.Pattern[str]:
    """Of a glob of the table; what the surrounding model class puts in front of a name has no numbers."""
    return re.compile(r"(?:[A-Za-z_]+\.)*?" + re.escape(glob).replace(r"\*", r"(\d+)"))
