"""The flat fp32 partitions of one rank's file and their optimizer states, which each ZeRO stage names differently."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.pt_file import PtFile

Number = int | float
KEPT = "kept"
"""Key of frozen masks in a flat's state: bits, 8 elements a byte, the first in the lowest bit."""


@dataclass(frozen=True)
class RankPartitions:
    """Partitions and optimizer states that one rank saved."""

    masters: list[Tensor] | None
    """Master of each flat, fp32 or bf16; None at stage 0 in fp32, where the module's weights are the masters."""
    states: list[dict[str, Any]]
    """Optimizer state of each flat."""
    param_groups: list[dict[str, Any]]
    """The inner optimizer's param groups: hyperparameters and our own keys, without the parameters."""
    param_group_of_flat: list[int]
    """Index into `param_groups` of each flat."""

    def flat(self, index: int, key: str | None) -> Tensor:
        """Return the (n,) elements of a flat's state, or of its master if `key` is None."""
        if key is not None:
            return self.states[index][key].detach().reshape(-1)
        assert self.masters is not None
        return self.masters[index].detach().reshape(-1)

    def step(self) -> list[float | None]:
        """Return the optimizer step of each flat; None if the optimizer does not count per flat."""
        return [_step_number(step) if (step := state.get("step")) is not None else None for state in self.states]


def _step_number(step: Any) -> float:
    """Return the number in a state's `step`, or raise TypeError."""
    if not (step.numel() == 1 if isinstance(step, Tensor) else isinstance(step, (int, float))):
        raise TypeError(f"the step of a state is {str(step)[:80]}")
    return float(step)


def read_field(archive: PtFile, kind: type, *keys: str) -> Any:
    """Return `content[key][key]...` of a file.

    Raises:
        ValueError: there is no such entry, or it is not a `kind`.
    """
    value: Any = archive.content
    for depth, key in enumerate(keys):
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"{archive.path}: not a DeepSpeed checkpoint, it has no {'.'.join(keys[: depth + 1])}")
        value = value[key]
    if not isinstance(value, kind):
        raise ValueError(f"{archive.path}: {'.'.join(keys)} is a {type(value).__name__}, expected a {kind.__name__}")
    return value


def read_stage(model: PtFile, optimizer: PtFile | None) -> int:
    """Return the ZeRO stage of the run that saved a checkpoint."""
    if optimizer is None:
        read_field(model, dict, "optimizer")
        return 0
    outer = read_field(optimizer, dict, "optimizer_state_dict")
    if "zero_stage" in outer:
        stage = int(read_field(optimizer, int, "optimizer_state_dict", "zero_stage"))
        if stage not in (1, 2, 3):
            raise ValueError(f"{optimizer.path}: unknown ZeRO stage {stage}")
        return stage
    read_field(optimizer, list, "optimizer_state_dict", "single_partition_of_fp32_groups")
    # BF16_Optimizer does not write its stage, and is used at stage 1 only.
    return 1


def read_flats(archive: PtFile, stage: int) -> RankPartitions:
    """Read masters and states from the optimizer file of a rank (stages 1 to 3) or from the model file (stage 0)."""
    # Each stage has keys of its own.
    if stage == 0:
        outer_keys: tuple[str, ...] = ("optimizer",)
        outer = read_field(archive, dict, "optimizer")
        inner_keys = (*outer_keys, "optimizer_state_dict") if "optimizer_state_dict" in outer else outer_keys
        masters = _stage0_masters(archive, outer)
    else:
        outer_keys = ("optimizer_state_dict",)
        outer = read_field(archive, dict, *outer_keys)
        inner_keys = (*outer_keys, "optimizer_state_dict" if stage == 3 else "base_optimizer_state")
        masters_key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        masters = read_field(archive, list, *outer_keys, masters_key)
    states_by_index = read_field(archive, dict, *inner_keys, "state")
    # Param groups, without the numbers of their parameters.
    param_groups = []
    indices = []
    param_group_of_flat = []
    for number, param_group in enumerate(read_field(archive, list, *inner_keys, "param_groups")):
        if not isinstance(param_group, dict) or not isinstance(param_group.get("params"), list):
            raise ValueError(f"{archive.path}: param group {number} is damaged")
        param_groups.append({key: value for key, value in param_group.items() if key != "params"})
        indices.extend(param_group["params"])
        param_group_of_flat.extend([number] * len(param_group["params"]))
    # Every flat has a master and a state.
    if masters is not None and (len(masters) != len(indices) or not all(isinstance(m, Tensor) for m in masters)):
        raise ValueError(f"{archive.path}: holds {len(masters)} fp32 partitions for {len(indices)} optimizer states")
    states = [states_by_index.get(index, {}) for index in indices]
    if not all(isinstance(state, dict) for state in states):
        raise ValueError(f"{archive.path}: the state of a parameter is not a dict")
    return RankPartitions(masters, states, param_groups, param_group_of_flat)


def zero12_partitions(archive: PtFile, flats: RankPartitions) -> list[int]:
    """Return the number of elements of this rank's partition of each param group, padding included.

    DeepSpeedZeroOptimizer cuts the padding off before it saves; BF16_Optimizer does not.
    """
    assert flats.masters is not None
    outer = read_field(archive, dict, "optimizer_state_dict")
    paddings = read_field(archive, list, "optimizer_state_dict", "group_paddings") if "zero_stage" in outer else None
    if paddings is not None and len(paddings) != len(flats.masters):
        raise ValueError(f"{archive.path}: {len(paddings)} paddings for {len(flats.masters)} param groups")
    return [master.numel() + (paddings[i] if paddings else 0) for i, master in enumerate(flats.masters)]


def zero12_alignment(archive: PtFile, param_groups: list[dict[str, tuple[int, ...]]]) -> list[list[int]]:
    """Return the number of alignment elements after each weight (`parameter_alignment`), mostly 0, by param group."""
    gaps = read_field(archive, dict, "optimizer_state_dict").get("param_alignment_paddings")
    if gaps is None:
        return [[0] * len(shapes) for shapes in param_groups]
    if [len(gap) for gap in gaps] != [len(shapes) for shapes in param_groups]:
        raise ValueError(f"{archive.path}: its param groups do not have the weights that the model file names")
    return [list(gap) for gap in gaps]


def stage0_names(
    archive: PtFile, flats: RankPartitions, shapes: dict[str, tuple[int, ...]], forge_state: dict[str, Any]
) -> list[dict[str, tuple[int, ...]]]:
    """Return the names and shapes in each flat of a stage-0 checkpoint.

    DeepSpeed saves no names at stage 0; our client state lists those of every param group, in order. Without a client
    state the flats have no names, and all weights are read from the module.
    """
    if not forge_state:
        return [{} for _ in flats.param_group_of_flat]
    named: list[dict[str, tuple[int, ...]]] = [{} for _ in flats.param_group_of_flat]
    for number, names in enumerate(_param_group_names(archive, flats, forge_state)):
        indices = [index for index, param_group in enumerate(flats.param_group_of_flat) if param_group == number]
        # A flat is one weight, or all weights of its param group end to end.
        names_of_flat = [[name] for name in names] if len(indices) == len(names) else [names]
        if len(indices) != len(names_of_flat) or not shapes.keys() >= set(names):
            raise ValueError(f"{archive.path}: param group {number} of its client state does not fit its optimizer")
        for index, flat_names in zip(indices, names_of_flat, strict=True):
            named[index] = {name: shapes[name] for name in flat_names}
            # The flat has as many elements as its weights.
            numel = sum(math.prod(shape) for shape in named[index].values())
            if flats.masters is not None:
                sizes = {flats.masters[index].numel()}
            else:
                states = {key: value for key, value in flats.states[index].items() if key != KEPT}
                sizes = {value.numel() for value in states.values() if isinstance(value, Tensor) and value.dim()}
            if sizes - {numel}:
                raise ValueError(f"{archive.path}: {flat_names} of its client state do not fit their optimizer state")
    return named


def is_prunable_group(param_group: dict[str, Any]) -> bool:
    """Return True if a param group holds prunable weights. Of Muon's groups DeepSpeed keeps no key but the name."""
    return param_group.get("sparseforge") == "prunable" or (
        "use_muon" in param_group and str(param_group.get("name")).startswith("prunable-")
    )


def _param_group_names(archive: PtFile, flats: RankPartitions, forge_state: dict[str, Any]) -> list[list[str]]:
    """Return the names of each param group's weights; those marked as prunable hold the prunable weights."""
    listed = forge_state.get("weights", [])
    param_groups = forge_state.get("param_groups")
    if not isinstance(listed, list) or not all(isinstance(w, dict) and isinstance(w.get("name"), str) for w in listed):
        raise ValueError(f"{archive.path}: the list of weights in its client state is damaged")
    if not isinstance(param_groups, list) or not all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in param_groups
    ):
        raise ValueError(f"{archive.path}: the list of param groups in its client state is damaged")
    names = [name for group in param_groups for name in group]
    pairs = zip(param_groups, flats.param_groups, strict=False)
    marked = [group for group, saved in pairs if is_prunable_group(saved)]
    if (
        len(param_groups) != len(flats.param_groups)
        or len(set(names)) != len(names)
        or sorted(name for group in marked for name in group) != sorted(weight["name"] for weight in listed)
    ):
        raise ValueError(f"{archive.path}: the param groups in its client state are not those of its optimizer")
    return param_groups


def _stage0_masters(archive: PtFile, outer: dict[str, Any]) -> list[Tensor] | None:
    """Return the masters of a 16-bit run at stage 0; None for fp32."""
    if "fp32_groups_flat" in outer:
        return list(read_field(archive, list, "optimizer", "fp32_groups_flat"))
    if "fp32_groups" in outer:
        return [master for group in read_field(archive, list, "optimizer", "fp32_groups") for master in group]
    return None


def read_bits(packed: Tensor, start: int, stop: int) -> Tensor:
    """Return elements [start, stop), bool, of bits that are packed as `KEPT`."""
    bits = (packed[start // 8 : -(-stop // 8), None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.view(-1)[start % 8 : start % 8 + stop - start].bool()


def element_states(state: dict[str, Any], numel: int) -> dict[str, torch.dtype]:
    """Return the dtype of each entry of a flat's state that holds one value per element; of bits torch.bool."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
    dtypes = {key: value.dtype for key, value in tensors.items() if value.numel() >= numel and key != KEPT}
    if KEPT in tensors and tensors[KEPT].dtype == torch.uint8 and 8 * tensors[KEPT].numel() >= numel:
        dtypes[KEPT] = torch.bool
    return dtypes


def number_states(state: dict[str, Any]) -> dict[str, Number]:
    """Return the entries of a flat's state that are one number; tensors become floats."""
    numbers: dict[str, Number] = {}
    for key, value in state.items():
        if key == KEPT:  # never one number, whatever a file says
            continue
        if isinstance(value, Tensor) and not value.dim() and not value.is_complex():
            numbers[key] = float(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[key] = value
    return numbers


def read_loss_scale(archive: PtFile, stage: int) -> dict[str, Number] | None:
    """Return the state of a dynamic fp16 loss scale; None if the scale is fixed or there is none."""
    outer = read_field(archive, dict, "optimizer" if stage == 0 else "optimizer_state_dict")
    scaler = outer if stage == 0 else getattr(outer.get("loss_scaler"), "__dict__", {})
    if not (outer.get("dynamic_loss_scale") if stage == 0 else scaler.get("dynamic")):
        return None
    keys = {"scale": "cur_scale", "iteration": "cur_iter", "last_overflow": "last_overflow_iter"}
    if stage:
        keys["hysteresis"] = "cur_hysteresis"
    numbers = {name: scaler.get(key) for name, key in keys.items()}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"{archive.path}: the {name} of its loss scale is {value!r}")
    return dict(numbers)  # type: ignore[arg-type]
