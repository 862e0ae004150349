"""Linear layer of vLLM whose weight stays packed, including fused ones like qkv and gate-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ChannelQuantScaleParameter, GroupQuantScaleParameter, PackedvLLMParameter
from vllm.model_executor.utils import set_weight_attrs

from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, scale_shape, values_per_element
from sparseforge_ds.packed_format.packing import POSITIONS, check24

_ROWS = 1024
"""Rows of a weight that are checked at once."""


@register_weight_loader_v2_supported_method
class Packed24LinearMethod(LinearMethodBase):
    """A linear layer whose weight stays packed: `weight` (out, in/2) and `weight_positions` (out, ceil(in/8)).

    Rounded values have their scales in `weight_scale`; two of int4 are an element.

    Args:
        prefix: name of the layer, for messages.
        transposed: True if the files hold the input axis first; vLLM transposes values, and this class the rest.
        grid: of rounded values; None for values in the model's dtype.
    """

    def __init__(self, prefix: str, transposed: bool, grid: Grid | None) -> None:
        self.prefix = prefix
        self.transposed = transposed
        self.grid = grid

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
        require_whole_bytes(self.prefix, input_size_per_partition, input_size, self.grid)
        outputs = sum(output_partition_sizes)
        load = extra_weight_attrs.pop("weight_loader")
        # Values, and positions, a byte for eight inputs.
        value_dtype = params_dtype if self.grid is None else self.grid.dtype
        inputs = 2 * values_per_element(value_dtype)
        for name, columns, factor, dtype, loader in (
            ("weight", input_size_per_partition // inputs, inputs, value_dtype, load),
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
        # A scale a row is the same for all ranks that divide the inputs; those of groups are divided with them.
        if self.grid is not None:
            shape = scale_shape((outputs, input_size_per_partition // inputs), 1, self.grid)
            kind = ChannelQuantScaleParameter if self.grid.group_size is None else GroupQuantScaleParameter
            scale = kind(
                data=torch.empty(shape, dtype=self.grid.scale_dtype),
                output_dim=0,
                **({} if self.grid.group_size is None else {"input_dim": 1}),
                weight_loader=self._transposing(load),
            )
            layer.register_parameter(f"weight{SCALE}", scale)
            set_weight_attrs(scale, extra_weight_attrs)

    @override
    def process_weights_after_loading(self, layer: Any) -> None:
        """Raise ValueError for a damaged weight, which products do not check."""
        require_sound(self.prefix, layer.weight.data, layer.weight_positions.data, scale_of(layer, "weight"))

    @override
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = scale_of(layer, "weight")
        product: Tensor = linear24(x, layer.weight, layer.weight_positions, bias, scale)
        return product

    def _transposing(self, load: Callable[..., None]) -> Callable[..., None]:
        """Return a loader that transposes, if the files hold the input axis first."""
        if not self.transposed:
            return load
        return lambda parameter, loaded, *more: load(parameter, loaded.t(), *more)


def scale_of(layer: nn.Module, name: str) -> Tensor | None:
    """Return the scales of a packed weight of a layer, or None if its values are not rounded."""
    scale = getattr(layer, name + SCALE, None)
    return None if scale is None else scale.data


def require_sound(name: str, values: Tensor, positions: Tensor, scale: Tensor | None) -> None:
    """Raise ValueError for a damaged packed weight: positions, or rounded values and scales.

    Args:
        name: name of the weight, for messages.
        values: (out, in/2), of int4 (out, in/4).
        positions: (out, ceil(in/8)).
        scale: of rounded values, else None.
    """
    try:
        for start in range(0, len(values), _ROWS):
            rows = slice(start, start + _ROWS)
            check24(values[rows], positions[rows], None if scale is None else scale[rows])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def require_whole_bytes(prefix: str, rank_inputs: int, inputs: int, grid: Grid | None = None) -> None:
    """Raise ValueError if tensor parallelism would divide eight inputs, a byte of positions, or those of a scale."""
    if rank_inputs != inputs and grid is not None and grid.group_size and rank_inputs % (2 * grid.group_size):
        raise ValueError(
            f"{prefix}: its {inputs} inputs, divided among tensor-parallel ranks, are {rank_inputs} each, but "
            f"{2 * grid.group_size} share a scale; use fewer ranks, or another --group_size of export "
            "if it was not trained so"
        )
    if rank_inputs != inputs and rank_inputs % 8:
        raise ValueError(
            f"{prefix}: its {inputs} inputs, divided among tensor-parallel ranks, are {rank_inputs} each, but packed24 "
            "needs a multiple of 8; use fewer ranks, or serve the hf export"
        )
