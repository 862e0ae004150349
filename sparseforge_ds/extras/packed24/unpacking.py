"""The step of transformers' loader that puts packed 2:4 weights into layers that compute with them.

A file of its own: transformers imports its quantizers, and with them `model.packed24`, before its loader.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.extras.packed24.file_headers import note_damage
from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.extras.packed24.merged_experts import held
from sparseforge_ds.extras.packed24.packed_experts import Packed24Experts
from sparseforge_ds.extras.packed24.packed_linear import Packed24Linear
from sparseforge_ds.mask.packed_values import SCALE
from sparseforge_ds.mask.packing import POSITIONS, check24, packed24_axis, unpack24
from sparseforge_ds.model.branch import Branch, LowRankConv1D, LowRankLinear, add_branch
from sparseforge_ds.transformers_internals import ConversionOps

_KEPT = (nn.Linear, Conv1D, LowRankLinear, LowRankConv1D)
"""Layers that a packed one takes the place of."""


class Unpack24(ConversionOps):  # type: ignore[misc]  # transformers is untyped
    """Values, positions and scales -> a layer that holds them, or the weight where no layer does: semi-structured
    tensors when asked for, and experts that `keep_experts` has named. A weight without positions stays as it is."""

    def __init__(self, semi_structured: bool) -> None:
        self.semi_structured = semi_structured

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, list[Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Take every entry that has a sibling with positions as a packed weight. Damage is noted on the model."""
        is_packed = len(input_dict) > 1
        if model is not None and full_layer_name is not None and is_packed and _is_own(source_patterns):
            layer = model.get_submodule(full_layer_name.rpartition(".")[0])
            if (type(layer) in _KEPT or _is_falcons(layer)) and not self.semi_structured:
                return _keep_packed(model, layer, full_layer_name, input_dict)
            if isinstance(layer, Packed24Experts):
                return _into_experts(model, full_layer_name, input_dict)
        result: dict[str, Any] = {}
        for name, tensors in input_dict.items():
            if _part(name):
                continue
            beside = [other for part in (POSITIONS, SCALE) for other in input_dict if _is_of(other, name, part)]
            parts = [input_dict[other] for other in beside]
            if not parts:
                result[name] = tensors
            else:
                dtype = _dtype_of(model, full_layer_name)
                rows = zip(tensors, *parts, strict=True)
                result[name] = [_unpacked(model, full_layer_name or name, dtype, *row) for row in rows]
        if not result:
            raise ValueError(f"{full_layer_name}{POSITIONS} is there without {full_layer_name}")
        if not _is_own(source_patterns) or full_layer_name is None:
            return result  # for the model's own conversions
        (tensors,) = result.values()
        (weight,) = tensors
        layer = model.get_submodule(full_layer_name.rpartition(".")[0]) if model is not None else None
        sparse = _semi_structured(weight, layer) if self.semi_structured and is_packed else None
        return {full_layer_name: weight if sparse is None else nn.Parameter(sparse, requires_grad=False)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Saving never packs: the conversion is taken off the model once it is loaded."""
        raise NotImplementedError("a packed model is saved dense")


class Packed24Conv1D(Packed24Linear):
    """As `Packed24Linear`, of GPT-2's layer, whose weight is (in, out): `weight` (in/2, out), `weight_positions`
    (ceil(in/8), out), `weight_scale` (1, out). In memory the inputs are contiguous. Not a `Conv1D`: peft reads the
    sizes of one off its weight.
    """

    def __init__(
        self, weight: Tensor, positions: Tensor, bias: nn.Parameter | None = None, scale: Tensor | None = None
    ) -> None:
        super().__init__(weight.t().contiguous(), positions.t().contiguous(), bias, scale)
        self.weight.data = self.weight.data.t()
        self.weight_positions = self.weight_positions.t()

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        scale = None if self.weight_scale is None else self.weight_scale.t()
        result: Tensor = linear24(input, self.weight.t(), self.weight_positions.t(), self.bias, scale)
        return result

    def dense(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the ordinary layer with the same weight, of 8-bit values in `dtype`; its bias is shared."""
        with torch.device("meta"):
            layer = Conv1D(self.out_features, self.in_features)
        weight = unpack24(self.weight.detach(), self.weight_positions, self.weight_scale, dtype)
        layer.weight = nn.Parameter(weight)
        layer.register_parameter("bias", self.bias)
        return layer.train(self.training)


def _keep_packed(model: nn.Module, layer: Any, name: str, given: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Put a packed layer in the place of `layer`, and return its tensors under their names for the loader to set."""
    parts = {_part(pattern): tensor for pattern, (tensor,) in given.items()}
    values, positions, scale = parts[""], parts[POSITIONS], parts.get(SCALE)
    try:
        check24(values, positions, scale)
    except ValueError as error:
        note_damage(model, name, error)
    kind: Any = Packed24Linear if isinstance(layer, nn.Linear) else Packed24Conv1D
    packed = kind(values, positions, layer.bias, scale)
    if _is_falcons(layer):
        packed.dense_class = type(layer)
    if isinstance(layer, Branch):
        add_branch(packed, layer.k, like=layer).enabled = True
    model.set_submodule(name.rpartition(".")[0], packed.train(layer.training))
    return {name + part: getattr(packed, f"weight{part}") for part in parts}


def _unpacked(
    model: Any, name: str, dtype: torch.dtype, values: Tensor, positions: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Return the dense weight; zeros in its place where it is damaged, which is noted on the model."""
    try:
        return unpack24(values, positions, scale, dtype)
    except ValueError as error:
        note_damage(model, name, error)
        shape = list(values.shape)
        shape[packed24_axis(values.shape, positions.shape)] *= 2
        return values.new_zeros(shape, dtype=values.dtype if scale is None else dtype)


def _dtype_of(model: Any, name: str | None) -> torch.dtype:
    """Return the dtype of a model's parameter, or float32 where there is none of that name."""
    place = dict(model.named_parameters()).get(name) if model is not None else None
    return torch.float32 if place is None else place.dtype


def _is_falcons(layer: nn.Module) -> bool:
    """Whether it is the layer of Falcon, by its name: its file is not imported for other models."""
    return isinstance(layer, nn.Linear) and type(layer).__name__ == "FalconLinear"


def _into_experts(model: nn.Module, name: str, given: dict[str, list[Tensor]]) -> dict[str, Any]:
    """The weight of a layer's experts that lies in one tensor in the file too."""
    tensors = {name + _part(pattern): tensor for pattern, (tensor,) in given.items()}
    return {key: held(model, key, tensor, tensors) for key, tensor in tensors.items()}


def _is_own(source_patterns: list[str]) -> bool:
    """Whether the loader is at our own conversion, and not at one of the model's that has taken us in."""
    return source_patterns[-1].endswith("$")


def _part(pattern: str) -> str:
    """Return the suffix that makes a pattern one of positions or of scales; "" for values."""
    name = pattern.removesuffix("$")
    return next((part for part in (POSITIONS, SCALE) if name.endswith(part)), "")


def _is_of(other: str, values: str, part: str) -> bool:
    return other.removesuffix("$") == values.removesuffix("$") + part


def _semi_structured(weight: Tensor, layer: object) -> Tensor | None:
    """A dense 2:4 weight as torch's semi-structured tensor, or None where torch has no kernel for it."""
    if not isinstance(layer, nn.Linear) or weight.device.type != "cuda" or weight.ndim != 2:
        return None
    from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUSPARSELT
    from torch.sparse import SparseSemiStructuredTensorCUTLASS as Cutlass

    capability = torch.cuda.get_device_capability(weight.device)
    cutlass = SparseSemiStructuredTensor._FORCE_CUTLASS or not torch.backends.cusparselt.is_available()
    if capability < (8, 0) or (cutlass and capability >= (9, 0)):  # its CUTLASS kernels are for 8.x
        return None
    kind = Cutlass if cutlass else SparseSemiStructuredTensorCUSPARSELT
    limits = kind._DTYPE_SHAPE_CONSTRAINTS.get(weight.dtype)
    if weight.dtype not in (torch.float16, torch.bfloat16) or limits is None:
        return None
    if weight.shape[0] % limits.sparse_min_rows or weight.shape[1] % limits.sparse_min_cols:
        return None
    sparse: Tensor = kind.from_dense(weight)
    return sparse
