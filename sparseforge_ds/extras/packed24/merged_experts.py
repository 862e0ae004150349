"""Experts in one tensor that stay packed when transformers loads them.

transformers merges the experts of a layer from a file's tensors by its own steps, which do the same to values,
positions and scales, so no expert is unpacked. Only transformers' loader imports this file, as it does `unpacking`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparseforge_ds.extras.packed24.file_headers import note_damage
from sparseforge_ds.extras.packed24.packed_experts import Packed24Experts, pack_experts, packed_kind
from sparseforge_ds.model.loading_targets import Targets
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, values_per_element
from sparseforge_ds.packed_format.packing import POSITIONS, check24
from sparseforge_ds.transformers_internals import Concatenate, ConversionOps, MergeModulelist, _IdentityOp

_LOGGER = logging.getLogger(__name__)


def keep_experts(
    model: Any, keys: Iterable[str], targets: Targets, conversions: list[Any], grid: Grid | None = None
) -> tuple[list[Any], list[Any]]:
    """Prepare an empty model for experts in one tensor whose weights are packed in its files.

    The conversions that merge them are repeated for values, positions and scales.

    Args:
        model: as `from_pretrained` has built it.
        keys: names of all tensors in the packed folder's files, after `check_headers`.
        targets: names of these tensors in the model.
        conversions: conversions by which transformers would load the dense model.
        grid: of the model's quantization_config.

    Returns:
        Conversions of experts that stay packed, and all others. One warning names the experts that must be unpacked.
    """
    # The packed weights of each layer of experts.
    merged_by = _packed_experts(model, keys, targets)
    layers: dict[str, list[str]] = {}
    for name in merged_by:
        layers.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
    # A layer keeps all of its weights packed, or none.
    kept: list[Any] = []
    unpacked: dict[str, str] = {}
    for layer, names in layers.items():
        experts = model.get_submodule(layer)
        by = [merged_by[f"{layer}.{name}"] for name in names]
        kind = packed_kind(experts)
        why = _why_unpacked(experts, kind, names, by)
        if kind is not None and why is None:
            pack_experts(experts, kind, names, grid)
            kept += [converter for converter in by if converter is not None and converter not in kept]
        else:
            unpacked[layer] = str(why)
    # The warning tells what unpacking costs.
    if unpacked:
        first, why = next(iter(unpacked.items()))
        weights = [model.get_parameter(f"{layer}.{name}") for layer in unpacked for name in layers[layer]]
        dense = sum(weight.nbytes for weight in weights)
        size = [(1 / values_per_element(grid.dtype) if grid else weight.itemsize) / 2 + 1 / 8 for weight in weights]
        packed = sum(weight.numel() * each for weight, each in zip(weights, size, strict=True))
        more = f" and {len(unpacked) - 1} more" if len(unpacked) > 1 else ""
        _LOGGER.warning(
            "%s%s: experts are unpacked, since %s; %.3g MB of memory in place of %.3g",
            *(first, more, why, dense / 1e6, packed / 1e6),
        )
    return [
        converter.copy(
            [pattern + part for pattern in converter._original_source_patterns],
            [pattern + part for pattern in converter._original_target_patterns],
            operations=[*converter.operations, Hold24(part == SCALE)],
        )
        for converter in kept
        for part in ("", POSITIONS, *([SCALE] if grid else []))
    ], [conversion for conversion in conversions if conversion not in kept]


def _packed_experts(model: Any, keys: Iterable[str], targets: Targets) -> dict[str, Any]:
    """Return the packed weights in three dimensions, each with the conversion that merges it, if there is one."""
    shapes = model.state_dict()
    merged_by = {}
    for key in sorted(key.removesuffix(POSITIONS) for key in keys if key.endswith(POSITIONS)):
        name, pattern = targets.find(key)
        if name in shapes and shapes[name].ndim == 3:
            merged_by[name] = None if pattern is None else targets.converter(pattern)
    return merged_by


def _why_unpacked(experts: nn.Module, kind: object, names: list[str], merged_by: list[Any]) -> str | None:
    """Return why the experts of a layer cannot stay packed, or None if they can."""
    if kind is None:
        return f"{type(experts).__name__} has a way of its own to compute them"
    dense = {name for name, parameter in experts.named_parameters(recurse=False) if parameter.ndim == 3} - {*names}
    if dense:
        return f"{min(dense)} is not packed"
    operations = {type(operation) for by in merged_by if by is not None for operation in by.operations}
    unknown = operations - {MergeModulelist, Concatenate}
    return f"{unknown.pop().__name__} is applied to them" if unknown else None


class Hold24(ConversionOps):  # type: ignore[misc]  # transformers is untyped
    """Step after the merge of a layer's experts that lays out one part as `Packed24Experts` has it.

    Args:
        of_scales: True if the part is scales.
    """

    def __init__(self, of_scales: bool = False) -> None:
        self.of_scales = of_scales

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, model: nn.Module, **kwargs: Any
    ) -> dict[str, Any]:
        """Lay out the merged tensors."""
        return {pattern: lay_out(model, full_layer_name, tensor) for pattern, tensor in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        """Return the identity: saving takes the tensors as they are."""
        return _IdentityOp()


def lay_out(model: nn.Module, name: str, tensor: Tensor, unset: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return a part of packed experts with each output's inputs contiguous, and any other tensor as it is.

    Damage is noted on the model: a wrong shape, and parts that `check24` refuses.

    Args:
        model: the model, prepared by `keep_experts`.
        name: name of the tensor in the model.
        tensor: values, positions or scales of all experts of a layer.
        unset: other parts of the same weight that the model does not have yet, by name.
    """
    layer, _, leaf = name.rpartition(".")
    experts: Any = model.get_submodule(layer)
    if not isinstance(experts, Packed24Experts):
        return tensor
    weight = name.removesuffix(POSITIONS).removesuffix(SCALE)
    expected = getattr(experts, leaf)
    if tensor.shape != expected.shape:
        note_damage(model, weight, ValueError(f"has shape {tuple(tensor.shape)}, not {tuple(expected.shape)}"))
        return torch.zeros_like(expected, device=tensor.device)

    # The last part is loaded when the others are there: then the weight is checked.
    base = leaf.removesuffix(POSITIONS).removesuffix(SCALE)
    parts = [part for part in ("", POSITIONS, SCALE) if hasattr(experts, base + part)]
    if leaf == base + parts[-1]:
        loaded = {**(unset or {}), name: tensor}
        tensors = [loaded.get(weight + part, getattr(experts, base + part)) for part in parts]
        for expert, of_expert in enumerate(zip(*tensors, strict=True)):
            try:
                check24(*of_expert)
            except ValueError as error:
                note_damage(model, f"{weight}, expert {expert}", error)
    if experts.is_transposed:
        tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor if leaf != base else nn.Parameter(tensor, requires_grad=False)
