"""The step of transformers' loader that turns packed 2:4 weights into what the model computes with.

A file of its own: transformers imports its quantizers, and with them `model.packed24`, before its loader.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from sparseforge_ds.mask.packing import POSITIONS, unpack24


class Unpack24(ConversionOps):  # type: ignore[misc]  # transformers is untyped
    """Values and positions -> the weight; a weight without positions stays as it is."""

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
        """Unpack every entry that has a sibling with positions.

        Raises:
            ValueError: positions without values, or damaged ones.
        """
        result: dict[str, Any] = {}
        for name, tensors in input_dict.items():
            if _is_positions(name):
                continue
            positions = next((input_dict[other] for other in input_dict if _belongs(other, name)), None)
            if positions is None:
                result[name] = tensors
            else:
                result[name] = [unpack24(*pair) for pair in zip(tensors, positions, strict=True)]
        if not result:
            raise ValueError(f"{full_layer_name}{POSITIONS} is there without {full_layer_name}")
        if not source_patterns[-1].endswith("$") or full_layer_name is None:
            return result  # for the model's own conversions
        (tensors,) = result.values()
        (weight,) = tensors
        layer = model.get_submodule(full_layer_name.rpartition(".")[0]) if model is not None else None
        sparse = _semi_structured(weight, layer) if self.semi_structured and len(input_dict) == 2 else None
        return {full_layer_name: weight if sparse is None else nn.Parameter(sparse, requires_grad=False)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Saving never packs: the conversion is taken off the model once it is loaded."""
        raise NotImplementedError("a packed model is saved dense")


def _is_positions(pattern: str) -> bool:
    return pattern.removesuffix("$").endswith(POSITIONS)


def _belongs(positions: str, values: str) -> bool:
    return positions.removesuffix("$") == values.removesuffix("$") + POSITIONS


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
