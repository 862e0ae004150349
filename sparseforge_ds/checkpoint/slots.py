"""Names and shapes of a checkpoint's weights, and the slots of flats that hold their elements.

A *flat* is one rank's one-dimensional fp32 partition of a param group (ZeRO-1/2) or of a sub-group (ZeRO-3), or a
full param group or parameter (stage 0). This is the offline counterpart of `zero/shard.py`, and reads no element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparseforge_ds.checkpoint.rank_files import RankFiles
from sparseforge_ds.checkpoint.zero_partitions import read_field, stage0_names, zero12_alignment, zero12_partitions

FlatShapes = list[dict[str, tuple[int, ...]]]
"""Names and full shapes of the weights in each flat, in its order."""


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of flat number `flat` of `rank`."""

    rank: int
    flat: int
    start: int
    stop: int


def read_aliases(files: RankFiles, module: dict[str, Any]) -> dict[str, str]:
    """Return the tied weights: name without data -> name that holds it."""
    if files.stage:
        return dict(read_field(files.model[0], dict, "shared_params"))
    first_name: dict[tuple[int, tuple[int, ...]], str] = {}
    aliases = {}
    for name, tensor in module.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            source = first_name.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            if source != name:
                aliases[name] = source
    return aliases


def read_flat_shapes(files: RankFiles, module: dict[str, Any], forge_state: dict[str, Any]) -> FlatShapes:
    """Return the names and shapes of the weights in each flat; they are the same on every rank."""
    if files.stage == 0:
        return stage0_names(files.model[0], files.flats(0), _shapes(module), forge_state)
    flat_shapes = read_field(files.model[0], list, "param_shapes")
    return [{name: tuple(shape) for name, shape in shapes.items()} for shapes in flat_shapes]


def read_slots(files: RankFiles, flat_shapes: FlatShapes) -> dict[str, list[Slot]]:
    """Return the slots of every weight's elements.

    Raises:
        ValueError: the ranks' partitions are not what the model file names.
    """
    first = files.model[0]
    masters = files.flats(0).masters
    if masters is not None and len(masters) != len(flat_shapes):
        raise ValueError(
            f"{files.state_file(0).path}: has {len(masters)} partitions, {first.path.name} names {len(flat_shapes)}"
        )
    if files.stage == 3:
        slots = zero3_slots(flat_shapes, files.world_size)
    elif files.stage == 0:
        slots = whole_slots(flat_shapes)
    else:
        partitions = [zero12_partitions(archive, files.flats(r)) for r, archive in enumerate(files.optimizer)]
        for archive, partition in zip(files.optimizer, partitions, strict=True):
            if partition != partitions[0]:
                raise ValueError(f"{archive.path}: partitions of {partition} elements, rank 0 has {partitions[0]}")
        slots = zero12_slots(flat_shapes, zero12_alignment(files.optimizer[0], flat_shapes), partitions[0])
    _check_flats(files, slots)
    if files.stage == 3:
        _check_lengths(files, flat_shapes)
    return slots


def read_shapes(
    files: RankFiles, module: dict[str, Any], flat_shapes: FlatShapes, without: set[str]
) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of all weights and buffers but `without`, in the order of the module.

    Raises:
        ValueError: module and optimizer give a weight different shapes.
    """
    first = files.model[0]
    shapes = _shapes(module)
    # At stage 3 the module holds pieces of its weights.
    if files.stage == 3:
        buffers = {name: shapes[name] for name in read_field(first, list, "buffer_names") if name in shapes}
        frozen = first.content.get("frozen_param_shapes") or {}
        shapes = {name: shape for group in flat_shapes for name, shape in group.items()}
        shapes |= {name: tuple(shape) for name, shape in frozen.items()} | buffers
    for name, shape in (item for group in flat_shapes for item in group.items()):
        if shapes.get(name) != shape:
            raise ValueError(f"{first.path}: {name} is {shapes.get(name)} in the module, {shape} in the optimizer")
    # Names that the module does not have come last.
    order = {name: position for position, name in enumerate(module)}
    names = sorted(shapes.keys() - without, key=lambda name: (order.get(name, len(order)), name))
    return {name: shapes[name] for name in names}


def zero3_slots(sub_groups: Sequence[Mapping[str, Sequence[int]]], world_size: int) -> dict[str, list[Slot]]:
    """Return the slots of every weight under ZeRO-3, which cuts each into `world_size` equal pieces.

    Args:
        sub_groups: names and full shapes of each sub-group, in the order of its flat.
        world_size: number of ranks.

    Returns:
        Slots of each weight, which end to end are the flat weight; the padding of the last pieces is left out.
    """
    slots: dict[str, list[Slot]] = {}
    for flat, shapes in enumerate(sub_groups):
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            piece = math.ceil(numel / world_size)
            slots[name] = [
                Slot(rank, flat, offset, offset + min(piece, numel - rank * piece))
                for rank in range(world_size)
                if numel > rank * piece
            ]
            offset += piece
    return slots


def zero12_slots(
    flat_shapes: Sequence[Mapping[str, Sequence[int]]], paddings: Sequence[Sequence[int]], partitions: Sequence[int]
) -> dict[str, list[Slot]]:
    """Return the slots of every weight under ZeRO-1/2, which cut a param group into equal partitions.

    Args:
        flat_shapes: names and full shapes of each flat, in order (with `round_robin_gradients`, the saved order).
        paddings: number of alignment elements after each weight of each flat.
        partitions: number of elements of one rank's partition of each flat, padding included.
    """
    slots: dict[str, list[Slot]] = {}
    for flat, (shapes, gaps, partition) in enumerate(zip(flat_shapes, paddings, partitions, strict=True)):
        offset = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            numel = math.prod(shape)
            slots[name] = _cut(flat, offset, offset + numel, partition)
            offset += numel + gap
    return slots


def whole_slots(flat_shapes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[Slot]]:
    """Return the slots of every weight at stage 0, where every rank holds all flats, of one or several weights each."""
    sizes = [sum(math.prod(shape) for shape in shapes.values()) for shapes in flat_shapes]
    return zero12_slots(flat_shapes, [[0] * len(shapes) for shapes in flat_shapes], sizes)


def _cut(flat: int, start: int, stop: int, partition: int) -> list[Slot]:
    """Return the slots of the elements [start, stop) of a param group that is cut at multiples of `partition`."""
    slots = []
    while start < stop:
        rank = start // partition
        end = min(stop, (rank + 1) * partition)
        slots.append(Slot(rank, flat, start - rank * partition, end - rank * partition))
        start = end
    return slots


def _shapes(module: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a module's state dict."""
    return {name: tuple(value.shape) for name, value in module.items() if isinstance(value, Tensor)}


def _check_flats(files: RankFiles, slots: dict[str, list[Slot]]) -> None:
    """Raise ValueError unless every slot lies inside its flat and all masters have one dtype."""
    masters = [m for rank in range(max(1, len(files.optimizer))) for m in files.flats(rank).masters or ()]
    if len(dtypes := sorted({str(master.dtype) for master in masters})) > 1:
        raise ValueError(f"{files.folder}: its masters are of several dtypes, {', '.join(dtypes)}; it was changed")
    for name, slot in ((name, slot) for name, own_slots in slots.items() for slot in own_slots):
        flats = files.flats(slot.rank).masters
        if flats is not None and (numel := flats[slot.flat].numel()) < slot.stop:
            raise ValueError(
                f"{files.state_file(slot.rank).path}: its partition {slot.flat} has {numel} elements, {name} needs "
                f"{slot.stop}; the file does not belong to {files.model[0].path.name}"
            )


def _check_lengths(files: RankFiles, sub_groups: FlatShapes) -> None:
    """Raise ValueError for a flat of ZeRO-3 that is longer than its pieces, which DeepSpeed lays end to end.

    Every rank's piece of a weight has one length, padding included, and pieces follow each other without gaps.
    """
    for rank, archive in enumerate(files.optimizer):
        for number, (master, shapes) in enumerate(zip(files.flats(rank).masters or (), sub_groups, strict=True)):
            length = sum(math.ceil(math.prod(shape) / files.world_size) for shape in shapes.values())
            if master.numel() != length:
                raise ValueError(
                    f"{archive.path}: its partition {number} has {master.numel()} elements, and the weights that "
                    f"{files.model[0].path.name} names make {length}; the two do not belong together, use another "
                    "checkpoint"
                )
