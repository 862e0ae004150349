"""Where the elements of a weight lie in the flat partitions of a DeepSpeed checkpoint.

The offline twin of `zero/shard.py`: sizes in, slots out, no tensors. A *flat* is one rank's one-dimensional fp32
partition of an optimizer group (ZeRO-1/2), of a sub-group (ZeRO-3), or the whole of a group or a parameter (stage 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of the flat `group` of `rank`."""

    rank: int
    group: int
    start: int
    stop: int


def zero3_slots(sub_groups: Sequence[Shapes], world_size: int) -> dict[str, list[Slot]]:
    """ZeRO-3 cuts every weight by itself into `world_size` equal pieces, the last ones padded. Sub-groups are names
    and full shapes in the order of their flats. Slots end to end are the flat weight; padding is left out."""
    slots: dict[str, list[Slot]] = {}
    for group, shapes in enumerate(sub_groups):
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            piece = math.ceil(numel / world_size)
            slots[name] = [
                Slot(rank, group, offset, offset + min(piece, numel - rank * piece))
                for rank in range(world_size)
                if numel > rank * piece
            ]
            offset += piece
    return slots


def zero12_slots(
    groups: Sequence[Shapes], paddings: Sequence[Sequence[int]], partitions: Sequence[int]
) -> dict[str, list[Slot]]:
    """ZeRO-1/2 lay the weights of a group end to end and cut the whole into equal partitions.

    Args:
        groups: names and full shapes in the order of each group's flat (with `round_robin_gradients`, the saved order).
        paddings: elements of alignment after each weight of each group.
        partitions: elements of one rank's partition of each group, padding included.
    """
    slots: dict[str, list[Slot]] = {}
    for group, (shapes, gaps, partition) in enumerate(zip(groups, paddings, partitions, strict=True)):
        offset = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            numel = math.prod(shape)
            slots[name] = _cut(group, offset, offset + numel, partition)
            offset += numel + gap
    return slots


def whole_slots(flats: Sequence[Shapes]) -> dict[str, list[Slot]]:
    """Stage 0 holds everything on every rank, in flats of one or of several weights."""
    sizes = [sum(math.prod(shape) for shape in shapes.values()) for shapes in flats]
    return zero12_slots(flats, [[0] * len(shapes) for shapes in flats], sizes)


def _cut(group: int, start: int, stop: int, partition: int) -> list[Slot]:
    """The run [start, stop) of a whole group, cut at multiples of `partition`."""
    slots = []
    while start < stop:
        rank = start // partition
        end = min(stop, (rank + 1) * partition)
        slots.append(Slot(rank, group, start - rank * partition, end - rank * partition))
        start = end
    return slots
