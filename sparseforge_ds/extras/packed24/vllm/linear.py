"""A linear layer of vLLM whose weight stays packed, fused ones like qkv and gate-up included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import PackedvLLMParameter
from vllm.model_executor.utils import set_weight_attrs

from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.mask.packing import POSITIONS, unpack24

_ROWS = 1024
"""Of a weight, looked at together."""


@register_weight_loader_v2_supported_method
class Packed24LinearMethod(LinearMethodBase):
    """A linear layer whose weight stays packed: `weight` (out, in/2) and `weight_positions` (out, ceil(in/8)).

    Args:
        prefix: name of the layer, for messages.
        transposed: the files hold the input axis first; vLLM turns values around, and positions are turned here.
    """

    def __init__(self, prefix: str, transposed: bool) -> None:
        self.prefix = prefix
        self.transposed = transposed

    @override
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        require_whole_bytes(self.prefix, input_size_per_partition, input_size)
        outputs, load = sum(output_partition_sizes), extra_weight_attrs.pop("weight_loader")
        for name, columns, factor, dtype, loader in (
            ("weight", input_size_per_partition // 2, 2, params_dtype, load),
            (f"weight{POSITIONS}", -(-input_size_per_partition // 8), 8, torch.uint8, self._turning(load)),
        ):
            parameter = PackedvLLMParameter(
                data=torch.empty(outputs, columns, dtype=dtype),
                input_dim=1,
                output_dim=0,
                packed_dim=1,
                packed_factor=factor,
                weight_loader=loader,
            )
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs)

    @override
    def process_weights_after_loading(self, layer: Any) -> None:
        """Refuse damaged positions once, some rows at a time, as no product looks for them."""
        require_sound(self.prefix, layer.weight.data, layer.weight_positions.data)

    @override
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = linear24(x, layer.weight, layer.weight_positions, bias)
        return product

    def _turning(self, load: Callable[..., None]) -> Callable[..., None]:
        if not self.transposed:
            return load
        return lambda parameter, loaded, *more: load(parameter, loaded.t(), *more)


def require_sound(name: str, values: Tensor, positions: Tensor) -> None:
    """Of a packed weight (out, in/2): the positions name two places of each group, some rows looked at together."""
    try:
        for rows in zip(values.split(_ROWS), positions.split(_ROWS), strict=True):
            unpack24(*rows)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def require_whole_bytes(prefix: str, here: int, whole: int) -> None:
    """A byte of positions belongs to eight inputs: a rank cannot hold half of one."""
    if here != whole and here % 8:
        raise ValueError(
            f"{prefix}: its {whole} inputs, divided among tensor-parallel ranks, are {here} each, which is no multiple "
            "of 8, as packed24 needs; use fewer ranks, or serve the hf export"
        )
