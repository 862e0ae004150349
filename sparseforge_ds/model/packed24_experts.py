"""Experts in one tensor that stay packed when transformers loads them.

transformers merges the experts of a layer from a file's tensors by its own steps, which do the same to values and to
positions; so no expert is ever unpacked. Imported by transformers' loader only, as `packed24_loading` is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    _IdentityOp,
    rename_source_key,
)

from sparseforge_ds.mask.packing import POSITIONS, check24
from sparseforge_ds.runtime.packed_experts import Packed24Experts, pack_experts, packed_kind

_LOGGER = logging.getLogger(__name__)


def keep_experts(model: Any, files: Iterable[str], conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Make place in a model, still empty, for the experts in one tensor whose weights are packed in `files`.

    The conversions that merge them are there twice afterwards: for their values, and for their positions.

    Args:
        model: as `from_pretrained` has built it.
        files: safetensors files of the packed folder.
        conversions: by which transformers would load the dense model.

    Returns:
        (conversions of experts that stay packed, all others). Experts of which some layer cannot keep them are named in
        one warning, and are unpacked.
    """
    merged_by = _packed_experts(model, files, conversions)
    layers: dict[str, list[str]] = {}
    for name in merged_by:
        layers.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
    kept: list[Any] = []
    unpacked: dict[str, str] = {}
    for layer, names in layers.items():
        experts = model.get_submodule(layer)
        by = [merged_by[f"{layer}.{name}"] for name in names]
        kind = packed_kind(experts)
        why = _why_unpacked(experts, kind, names, by)
        if kind is not None and why is None:
            pack_experts(experts, kind, names)
            kept += [converter for converter in by if converter is not None and converter not in kept]
        else:
            unpacked[layer] = str(why)
    if unpacked:
        first, why = next(iter(unpacked.items()))
        weights = [model.get_parameter(f"{layer}.{name}") for layer in unpacked for name in layers[layer]]
        dense = sum(weight.nbytes for weight in weights)
        packed = sum(weight.nbytes / 2 + weight.numel() / 8 for weight in weights)
        more = f" and {len(unpacked) - 1} more" if len(unpacked) > 1 else ""
        _LOGGER.warning(
            "%s%s: experts are unpacked, since %s; %.3g MB of memory in place of %.3g",
            *(first, more, why, dense / 1e6, packed / 1e6),
        )
    return [
        converter.copy(
            [pattern + what for pattern in converter._original_source_patterns],
            [pattern + what for pattern in converter._original_target_patterns],
            operations=[*converter.operations, Hold24()],
        )
        for converter in kept
        for what in ("", POSITIONS)
    ], [conversion for conversion in conversions if conversion not in kept]


def _packed_experts(model: Any, files: Iterable[str], conversions: list[Any]) -> dict[str, Any]:
    """The weights in three dimensions that are packed in `files`, and what merges them from there, if anything."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    shapes, keys = model.state_dict(), set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            keys.update(tensors.keys())
    found = {}
    for key in sorted(key.removesuffix(POSITIONS) for key in keys if key.endswith(POSITIONS)):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, shapes)
        if name in shapes and shapes[name].ndim == 3:
            if key not in keys:
                raise ValueError(f"{key}{POSITIONS} is there without {key}")
            found[name] = next((each for each in converters if pattern in each.source_patterns), None)
    return found


def _why_unpacked(experts: nn.Module, kind: object, names: list[str], merged_by: list[Any]) -> str | None:
    """Why the experts of a layer cannot stay packed."""
    if kind is None:
        return f"{type(experts).__name__} has a way of its own to compute them"
    dense = {name for name, parameter in experts.named_parameters(recurse=False) if parameter.ndim == 3} - {*names}
    if dense:
        return f"{min(dense)} is not packed"
    operations = {type(operation) for by in merged_by if by is not None for operation in by.operations}
    others = operations - {MergeModulelist, Concatenate}
    return f"{others.pop().__name__} is applied to them" if others else None


class Hold24(ConversionOps):  # type: ignore[misc]  # transformers is untyped
    """After the merge of all experts of a layer, for their values and for their positions: as `Packed24Experts` has
    them."""

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, model: nn.Module, **kwargs: Any
    ) -> dict[str, Any]:
        """Raises ValueError for damaged positions."""
        return {pattern: held(model, full_layer_name, tensor) for pattern, tensor in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        """Saving takes the tensors as they are held."""
        return _IdentityOp()


def held(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A tensor that there is a place for, with each output's inputs side by side in memory; any other one as it is.
    Raises ValueError for damaged positions."""
    where, _, leaf = name.rpartition(".")
    experts: Any = model.get_submodule(where)
    values = getattr(experts, leaf.removesuffix(POSITIONS))
    if not isinstance(experts, Packed24Experts) or tensor.shape != getattr(experts, leaf).shape:
        return tensor  # a shape that is wrong is the loader's to report
    if leaf.endswith(POSITIONS):
        for expert, positions in enumerate(tensor):
            try:
                check24(values[expert], positions)
            except ValueError as error:
                raise ValueError(f"{name.removesuffix(POSITIONS)}, expert {expert}: {error}") from None
    if experts.is_transposed:
        tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor if leaf.endswith(POSITIONS) else nn.Parameter(tensor, requires_grad=False)
