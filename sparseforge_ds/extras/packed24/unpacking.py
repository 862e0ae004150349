"""Step of transformers' loader that puts packed 2:4 weights into layers that compute with them.

It is a file of its own, since transformers imports its quantizers, and with them this package, before its loader.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.extras.packed24.file_headers import note_damage
from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.extras.packed24.merged_experts import lay_out
from sparseforge_ds.extras.packed24.packed_experts import Packed24Experts
from sparseforge_ds.extras.packed24.packed_linear import Packed24Linear
from sparseforge_ds.model.branch import Branch, LowRankConv1D, LowRankLinear, add_branch
from sparseforge_ds.packed_format.packed_values import SCALE, values_per_element
from sparseforge_ds.packed_format.packing import POSITIONS, check24, packed24_axis, require_finite, unpack24
from sparseforge_ds.transformers_internals import ConversionOps

_REPLACED = (nn.Linear, Conv1D, LowRankLinear, LowRankConv1D)
"""Layers that a packed one replaces."""


class Unpack24(ConversionOps):  # type: ignore[misc]  # transformers is untyped
    """Conversion of values, positions and scales into a layer that holds them.

    Weights without such a layer are unpacked, into semi-structured tensors if asked for. A weight without positions
    stays as it is.

    Args:
        semi_structured: make torch's semi-structured tensors of linear layers.
    """

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
        """Convert every entry that has a sibling with positions; damage is noted on the model."""
        # A layer of the model takes the parts as they are.
        is_packed = len(input_dict) > 1
        if model is not None and full_layer_name is not None and is_packed and _is_own(source_patterns):
            layer = model.get_submodule(full_layer_name.rpartition(".")[0])
            if is_replaced(layer) and not self.semi_structured:
                return _keep_packed(model, layer, full_layer_name, input_dict)
            if isinstance(layer, Packed24Experts):
                return _into_experts(model, full_layer_name, input_dict)
        # Other packed weights are unpacked.
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
            raise ValueError(f"{full_layer_name}{POSITIONS} exists without {full_layer_name}; export the model again")
        # The model's own conversions go on with several tensors; a weight by itself is finished here.
        if not _is_own(source_patterns) or full_layer_name is None:
            return result
        (tensors,) = result.values()
        (weight,) = tensors
        layer = model.get_submodule(full_layer_name.rpartition(".")[0]) if model is not None else None
        sparse = _semi_structured(weight, layer) if self.semi_structured and is_packed else None
        return {full_layer_name: weight if sparse is None else nn.Parameter(sparse, requires_grad=False)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Raise NotImplementedError: the conversion is removed from the model once it is loaded."""
        raise NotImplementedError("a packed model is saved dense")


class Packed24Conv1D(Packed24Linear):
    """Packed layer of GPT-2, whose weight is (in, out).

    `weight` is (in/2, out), `weight_positions` (ceil(in/8), out), `weight_scale` (1 or groups, out). In memory the
    inputs are contiguous. It is no `Conv1D`, since peft reads the sizes of one from its weight.
    """

    def __init__(
        self, weight: Tensor, positions: Tensor, bias: nn.Parameter | None = None, scale: Tensor | None = None
    ) -> None:
        super().__init__(weight.t().contiguous(), positions.t().contiguous(), bias, scale)
        if scale is not None:
            self.weight_scale = scale.t().contiguous().t()
        self.weight.data = self.weight.data.t()
        self.weight_positions = self.weight_positions.t()

    def forward(self, input: Tensor) -> Tensor:
        """Multiply (..., in) by the weight, and return (..., out)."""
        scale = None if self.weight_scale is None else self.weight_scale.t()
        result: Tensor = linear24(input, self.weight.t(), self.weight_positions.t(), self.bias, scale)
        return result

    def dense(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the ordinary layer with the same weight, of rounded values in `dtype`; its bias is shared."""
        with torch.device("meta"):
            layer = Conv1D(self.out_features, self.in_features)
        weight = unpack24(self.weight.detach(), self.weight_positions, self.weight_scale, dtype)
        layer.weight = nn.Parameter(weight)
        layer.register_parameter("bias", self.bias)
        return layer.train(self.training)


def _keep_packed(model: nn.Module, layer: Any, name: str, tensors: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Replace `layer` by a packed one, and return its tensors under their names for the loader to set."""
    parts = {_part(pattern): tensor for pattern, (tensor,) in tensors.items()}
    values = parts[""]
    positions = parts[POSITIONS]
    scale = parts.get(SCALE)
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
    """Return the dense weight, or note damage on the model and return zeros."""
    try:
        weight = unpack24(values, positions, scale, dtype)
        require_finite(values, scale)
        return weight
    except ValueError as error:
        note_damage(model, name, error)
        shape = list(values.shape)
        axis = packed24_axis(values.shape, positions.shape, values.dtype)
        shape[axis] *= 2 * values_per_element(values.dtype)
        return values.new_zeros(shape, dtype=values.dtype if scale is None else dtype)


def _dtype_of(model: Any, name: str | None) -> torch.dtype:
    """Return the dtype of a model's parameter, or float32 if there is none of that name."""
    parameter = dict(model.named_parameters()).get(name) if model is not None else None
    return torch.float32 if parameter is None else parameter.dtype


def is_replaced(layer: nn.Module) -> bool:
    """Return True for a layer in whose place a packed one is put."""
    return type(layer) in _REPLACED or _is_falcons(layer)


def _is_falcons(layer: nn.Module) -> bool:
    """Return True for Falcon's layer, by its name, since its file is not imported for other models."""
    return isinstance(layer, nn.Linear) and type(layer).__name__ == "FalconLinear"


def _into_experts(model: nn.Module, name: str, parts: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Lay out the parts of a weight of experts that is one tensor in the file too."""
    tensors = {name + _part(pattern): tensor for pattern, (tensor,) in parts.items()}
    return {key: lay_out(model, key, tensor, tensors) for key, tensor in tensors.items()}


def _is_own(source_patterns: list[str]) -> bool:
    """Return True for our own conversion, and False for one of the model's that includes this step."""
    return source_patterns[-1].endswith("$")


def _part(pattern: str) -> str:
    """Return the suffix that makes a pattern one of positions or of scales; "" for values."""
    name = pattern.removesuffix("$")
    return next((part for part in (POSITIONS, SCALE) if name.endswith(part)), "")


def _is_of(other: str, values: str, part: str) -> bool:
    """Return True if `other` is the pattern of that part of the weight `values`."""
    return other.removesuffix("$") == values.removesuffix("$") + part


def _semi_structured(weight: Tensor, layer: object) -> Tensor | None:
    """Convert a dense 2:4 weight to torch's semi-structured tensor, or return None if torch has no kernel for it."""
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
