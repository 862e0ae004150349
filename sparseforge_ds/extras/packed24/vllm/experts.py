"""Experts of vLLM whose weights stay packed, one tensor for all of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEQuantConfig,
    biased_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from sparseforge_ds.extras.packed24.experts24 import add_choices, experts24, sort_by_expert
from sparseforge_ds.extras.packed24.vllm.linear import require_sound, require_whole_bytes, scale_of
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, scale_shape, values_per_element
from sparseforge_ds.packed_format.packing import POSITIONS

_EMPTY_GROUPS = 0x44
"""Byte of positions whose two groups hold their first two elements."""


class Packed24ExpertsMethod(FusedMoEMethodBase):
    """Fused experts that stay packed.

    `w13_weight` (gate and up) and `w2_weight` (down) hold the values of all experts of a rank, (experts, out, in/2);
    `w13_weight_positions` and `w2_weight_positions` hold their positions, and those that end in `_scale` the scales of
    rounded values; two of int4 are an element. Tensor and expert parallelism, shared experts and sums over ranks are
    vLLM's own, around `apply`.

    Args:
        moe: vLLM's configuration of the layer.
        prefix: name of the layer, for messages.
        grid: of rounded values; None for values in the model's dtype.
    """

    def __init__(self, moe: Any, prefix: str, grid: Grid | None) -> None:
        super().__init__(moe)
        self.prefix = prefix
        self.grid = grid

    @override
    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        require_whole_bytes(self.prefix, intermediate_size_per_partition, self.moe.intermediate_size, self.grid)
        value_dtype = params_dtype if self.grid is None else self.grid.dtype
        up = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        for name, outputs, inputs in (
            ("w13", up, hidden_size),
            ("w2", hidden_size, intermediate_size_per_partition),
        ):
            values = (num_experts, outputs, inputs // (2 * values_per_element(value_dtype)))
            parts: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
                f"{name}_weight": (values, value_dtype, 0),
                # vLLM may pad, and loads nothing into the padding.
                f"{name}_weight{POSITIONS}": ((num_experts, outputs, -(-inputs // 8)), torch.uint8, _EMPTY_GROUPS),
            }
            if self.grid is not None:
                parts[f"{name}_weight{SCALE}"] = (scale_shape(values, -1, self.grid), self.grid.scale_dtype, 1)
            if self.moe.has_bias:
                parts[f"{name}_bias"] = ((num_experts, outputs), params_dtype, 0)
            for part, (shape, dtype, start) in parts.items():
                parameter = nn.Parameter(torch.full(shape, start, dtype=dtype), requires_grad=False)
                layer.register_parameter(part, parameter)
                set_weight_attrs(parameter, extra_weight_attrs)
                if part.endswith(SCALE):  # vLLM's loader asks of every scale what it belongs to
                    kind = FusedMoeWeightScaleSupported.CHANNEL
                    if self.grid is not None and self.grid.group_size is not None:
                        kind = FusedMoeWeightScaleSupported.GROUP
                    set_weight_attrs(parameter, {"quant_method": kind.value})

    @override
    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        if self.moe.has_bias:
            return biased_moe_quant_config(layer.w13_bias, layer.w2_bias)
        return FUSED_MOE_UNQUANTIZED_CONFIG

    @override
    def process_weights_after_loading(self, layer: Any) -> None:
        """Raise ValueError for damaged weights, an expert at a time."""
        for name in ("w13_weight", "w2_weight"):
            values = getattr(layer, name).data
            positions = getattr(layer, name + POSITIONS).data
            scale = scale_of(layer, name)
            for expert in range(len(values)):
                of_expert = None if scale is None else scale[expert]
                require_sound(f"{self.prefix}.{name}", values[expert], positions[expert], of_expert)

    @override
    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the experts' outputs (tokens, hidden), for the weights and experts of each token, (tokens, k).

        vLLM computes shared experts, since this method has no kernel that could overlap them.
        """
        # Sort the rows by expert; experts of other ranks get weight 0 and have no rows here.
        chosen = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        experts, order, ends = sort_by_expert(chosen, len(layer.w2_weight))
        rows = x[order // topk_ids.shape[1]]
        shares = topk_weights.masked_fill(chosen < 0, 0)
        if layer.apply_router_weight_on_input:
            rows = (rows * shares.reshape(-1)[order, None]).to(x.dtype)
            shares = (chosen >= 0).to(shares.dtype)
        # Gate and up, activation, down.
        up = self._product(layer, "w13", rows, experts, ends)
        inner = up.new_empty(up.shape[0], up.shape[1] // 2 if layer.activation.is_gated else up.shape[1])
        settings = ApplyMoEActivationConfig.from_configs(self.moe, self.moe_quant_config)
        apply_moe_activation(layer.activation, inner, up, activation_config=settings)
        return add_choices(self._product(layer, "w2", inner, experts, ends), order, shares).to(x.dtype)

    def _product(self, layer: Any, name: str, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows (rows, in) with the weights of their sorted `experts` (rows,), and return (rows, out)."""
        values = getattr(layer, f"{name}_weight")
        positions = getattr(layer, f"{name}_weight{POSITIONS}")
        y: Tensor = experts24(x, values, positions, ends, scale_of(layer, f"{name}_weight"))
        return y + getattr(layer, f"{name}_bias")[experts.clamp(max=len(values) - 1)] if self.moe.has_bias else y
