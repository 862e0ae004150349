"""The step of transformers' loader that turns packed 2:4 weights into what the model computes with.

A file of its own: transformers imports its quantizers, and with them `model.packed24`, before its loader.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from sparseforge_ds.mask.packing import POSITIONS, unpack24
from sparseforge_ds.model.semi_structured import semi_structured


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
        sparse = semi_structured(weight, layer) if self.semi_structured and len(input_dict) == 2 else None
        return {full_layer_name: weight if sparse is None else nn.Parameter(sparse, requires_grad=False)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Saving never packs: the conversion is taken off the model once it is loaded."""
        raise NotImplementedError("a packed model is saved dense")


def _is_positions(pattern: str) -> bool:
    return pattern.removesuffix("$").endswith(POSITIONS)


def _belongs(positions: str, values: str) -> bool:
    return positions.removesuffix("$") == values.removesuffix("$") + POSITIONS
