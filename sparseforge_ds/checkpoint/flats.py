"""The flat fp32 partitions and their optimizer states inside one rank's file, whatever the ZeRO stage calls them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.archive import Archive


@dataclass(frozen=True)
class RankFlats:
    """What one rank saved."""

    masters: list[Tensor] | None
    """fp32 (or bf16) master of each flat; None at stage 0 in fp32, where the module's weights are the masters."""
    states: list[dict[str, Any]]
    """The inner optimizer's state of each flat."""
    groups: list[dict[str, Any]]
    """The inner optimizer's param groups: hyperparameters and our own keys, without the parameters."""
    group_of_flat: list[int]
    """Index into `groups` of each flat."""

    def step(self) -> list[float | None]:
        """The optimizer step of each flat, where the optimizer counts per flat."""
        return [float(step) if (step := state.get("step")) is not None else None for state in self.states]


def field(archive: Archive, kind: type, *keys: str) -> Any:
    """`content[key][key]...` of a file, of a given type.

    Raises:
        ValueError: there is no such entry, or it is something else.
    """
    value: Any = archive.content
    for depth, key in enumerate(keys):
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"{archive.path}: not a DeepSpeed checkpoint, it has no {'.'.join(keys[: depth + 1])}")
        value = value[key]
    if not isinstance(value, kind):
        raise ValueError(f"{archive.path}: {'.'.join(keys)} is a {type(value).__name__}, expected a {kind.__name__}")
    return value


def read_stage(model: Archive, optimizer: Archive | None) -> int:
    """The ZeRO stage that wrote a checkpoint."""
    if optimizer is None:
        field(model, dict, "optimizer")
        return 0
    outer = field(optimizer, dict, "optimizer_state_dict")
    if "zero_stage" in outer:
        stage = int(field(optimizer, int, "optimizer_state_dict", "zero_stage"))
        if stage not in (1, 2, 3):
            raise ValueError(f"{optimizer.path}: unknown ZeRO stage {stage}")
        return stage
    field(optimizer, list, "optimizer_state_dict", "single_partition_of_fp32_groups")
    return 1  # BF16_Optimizer does not write its stage and is only used at stage 1


def read_flats(archive: Archive, stage: int) -> RankFlats:
    """Find masters and states in the optimizer file of a rank (stages 1 to 3) or in the model file (stage 0).

    Raises:
        ValueError: an entry is missing or of the wrong type or size.
    """
    if stage == 0:
        outer_keys: tuple[str, ...] = ("optimizer",)
        outer = field(archive, dict, "optimizer")
        inner_keys = (*outer_keys, "optimizer_state_dict") if "optimizer_state_dict" in outer else outer_keys
        masters = _stage0_masters(archive, outer)
    else:
        outer_keys = ("optimizer_state_dict",)
        outer = field(archive, dict, *outer_keys)
        inner_keys = (*outer_keys, "optimizer_state_dict" if stage == 3 else "base_optimizer_state")
        masters_key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        masters = field(archive, list, *outer_keys, masters_key)
    states_by_index = field(archive, dict, *inner_keys, "state")
    groups, indices, group_of_flat = [], [], []
    for number, group in enumerate(field(archive, list, *inner_keys, "param_groups")):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ValueError(f"{archive.path}: param group {number} is damaged")
        groups.append({key: value for key, value in group.items() if key != "params"})
        indices.extend(group["params"])
        group_of_flat.extend([number] * len(group["params"]))
    if masters is not None and (len(masters) != len(indices) or not all(isinstance(m, Tensor) for m in masters)):
        raise ValueError(f"{archive.path}: holds {len(masters)} fp32 partitions for {len(indices)} optimizer states")
    states = [states_by_index.get(index, {}) for index in indices]
    if not all(isinstance(state, dict) for state in states):
        raise ValueError(f"{archive.path}: the state of a parameter is not a dict")
    return RankFlats(masters, states, groups, group_of_flat)


def zero12_partitions(archive: Archive, flats: RankFlats) -> list[int]:
    """Elements of this rank's partition of each group, padding included.

    DeepSpeedZeroOptimizer cuts the padding off before it saves, BF16_Optimizer does not.
    """
    assert flats.masters is not None
    outer = field(archive, dict, "optimizer_state_dict")
    paddings = field(archive, list, "optimizer_state_dict", "group_paddings") if "zero_stage" in outer else None
    if paddings is not None and len(paddings) != len(flats.masters):
        raise ValueError(f"{archive.path}: {len(paddings)} paddings for {len(flats.masters)} groups")
    return [master.numel() + (paddings[i] if paddings else 0) for i, master in enumerate(flats.masters)]


def zero12_alignment(archive: Archive, groups: list[dict[str, tuple[int, ...]]]) -> list[list[int]]:
    """Elements of alignment after each weight of each group (`parameter_alignment`), mostly 0."""
    gaps = field(archive, dict, "optimizer_state_dict").get("param_alignment_paddings")
    if gaps is None:
        return [[0] * len(group) for group in groups]
    if [len(gap) for gap in gaps] != [len(group) for group in groups]:
        raise ValueError(f"{archive.path}: its groups do not have the weights that the model file names")
    return [list(gap) for gap in gaps]


def stage0_names(
    archive: Archive, flats: RankFlats, shapes: dict[str, tuple[int, ...]], forge_state: dict[str, Any]
) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes in each flat of a stage-0 checkpoint.

    DeepSpeed saves no names at stage 0. Prunable groups hold the weights that our client state lists, in that order;
    flats of other groups stay nameless, and their weights are read from the module.
    """
    listed = forge_state.get("weights", [])
    if not isinstance(listed, list) or not all(isinstance(w, dict) and isinstance(w.get("name"), str) for w in listed):
        raise ValueError(f"{archive.path}: the list of weights in its client state is damaged")
    names = iter([weight["name"] for weight in listed])
    named: list[dict[str, tuple[int, ...]]] = []
    for flat, state in enumerate(flats.states):
        content: dict[str, tuple[int, ...]] = {}
        named.append(content)
        if flats.groups[flats.group_of_flat[flat]].get("sparseforge") != "prunable":
            continue
        if flats.masters is not None:
            room = flats.masters[flat].numel()
        else:
            room = max((value.numel() for value in state.values() if isinstance(value, Tensor)), default=0)
        while room > 0:
            name = next(names, "the list of weights")
            if name not in shapes or math.prod(shapes[name]) > room:
                raise ValueError(f"{archive.path}: {name} of its client state does not fit its optimizer state")
            content[name] = shapes[name]
            room -= math.prod(shapes[name])
    if (left := next(names, None)) is not None:
        raise ValueError(f"{archive.path}: its client state names {left}, which has no optimizer state")
    return named


def _stage0_masters(archive: Archive, outer: dict[str, Any]) -> list[Tensor] | None:
    if "fp32_groups_flat" in outer:
        return list(field(archive, list, "optimizer", "fp32_groups_flat"))
    if "fp32_groups" in outer:
        return [master for group in field(archive, list, "optimizer", "fp32_groups") for master in group]
    return None


def element_states(state: dict[str, Any], numel: int) -> set[str]:
    """Keys of a flat's state that hold one value per element."""
    return {key for key, value in state.items() if isinstance(value, Tensor) and value.dim() and value.numel() >= numel}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that also holds for NaN and tells -0.0 from +0.0."""
    view = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if a.dtype != b.dtype or a.shape != b.shape or a.element_size() not in view:
        return a.dtype == b.dtype and torch.equal(a, b)
    integer = view[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
