"""Linear layer of vLLM whose weight stays packed, including fused ones like qkv and gate-up."""

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
"""Rows of a weight that are checked at once."""


@register_weight_loader_v2_supported_method
class Packed24LinearMethod(LinearMethodBase):
    """A linear layer whose weight stays packed: `weight` (out, in/2) and `weight_positions` (out, ceil(in/8)).

    Args:
        prefix: name of the layer, for messages.
        transposed: True if the files hold the input axis first; vLLM transposes values, and this class positions.
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
        outputs = sum(output_partition_sizes)
        load = extra_weight_attrs.pop("weight_loader")
        # Values, and positions, a byte for eight inputs.
        for name, columns, factor, dtype, loader in (
            ("weight", input_size_per_partition // 2, 2, params_dtype, load),
            (f"weight{POSITIONS}", -(-input_size_per_partition // 8), 8, torch.uint8, self._transposing(load)),
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
        """Raise ValueError for damaged positions, which products do not check."""
        require_sound(self.prefix, layer.weight.data, layer.weight_positions.data)

    @override
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = linear24(x, layer.weight, layer.weight_positions, bias)
        return product

    def _transposing(self, load: Callable[..., None]) -> Callable[..., None]:
        """Return a loader that transposes, if the files hold the input axis first."""
        if not self.transposed:
            return load
        return lambda parameter, loaded, *more: load(parameter, loaded.t(), *more)


def require_sound(name: str, values: Tensor, positions: Tensor) -> None:
    """Raise ValueError unless the positions of a packed weight (out, in/2) name two elements of each group."""
    try:
        for rows in zip(values.split(_ROWS), positions.split(_ROWS), strict=True):
            unpack24(*rows)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def require_whole_bytes(prefix: str, rank_inputs: int, inputs: int) -> None:
    """Raise ValueError if tensor parallelism would divide a byte of positions, which belongs to eight inputs."""
    if rank_inputs != inputs and rank_inputs % 8:
        raise ValueError(
            f"{prefix}: its {inputs} inputs, divided among tensor-parallel ranks, are {rank_inputs} each, but packed24 "
            "needs a multiple of 8; use fewer ranks, or serve the hf export"
        )
