"""The packed24 format as vLLM wants a format: which layers have it, what they load, how they multiply.

A linear layer, fused ones like qkv and gate-up included, holds the values and positions of its part of the rows or
columns and calls `linear24`. Experts are unpacked when they are loaded, because vLLM's fused kernels want dense ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.parameter import PackedvLLMParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.config import get_safetensors_params_metadata

from sparseforge_ds.mask.packing import PACKED24, PACKED24_FORMAT, POSITIONS, packed24_axis, unpack24
from sparseforge_ds.runtime.linear24 import linear24

_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""vLLM's usual fused layers, for a model that does not say which ones it has."""
_ROWS = 1024
"""Of a weight, looked at together."""
_EMPTY_GROUPS = 0x44
"""A byte of positions whose two groups hold their first two elements."""


class Packed24VLLMConfig(QuantizationConfig):
    """The `quantization_config` of a packed24 folder, as vLLM holds it. It is pickled for vLLM's other processes.

    Raises:
        ValueError: a format that this version does not know.
    """

    def __init__(self, format: int = PACKED24_FORMAT) -> None:
        super().__init__()
        if format != PACKED24_FORMAT:
            raise ValueError(
                f"{PACKED24}: format {format!r} is not what this version of sparseforge_ds reads (format "
                f"{PACKED24_FORMAT}); upgrade it, or export again"
            )
        self.transposed: dict[str, bool] = {}
        """Every packed module, and whether its inputs are its first axis, as in GPT-2."""

    @override
    def get_name(self) -> str:
        return PACKED24

    @override
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    @override
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    @override
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    @override
    def from_config(cls, config: dict[str, Any]) -> Packed24VLLMConfig:
        if config.get("low_rank"):
            raise ValueError(
                f"{PACKED24}: the model has low-rank branches (low_rank of its quantization_config), without which its "
                "weights compute nonsense, and which vLLM does not add; use transformers, or train without low_rank"
            )
        return cls(config.get("format", PACKED24_FORMAT))

    @override
    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Look up in the headers of the weights which modules are packed.

        Raises:
            ValueError: none is, or a low-rank adapter belongs to the weights.
        """
        if (Path(model_name) / "adapter_config.json").is_file():
            raise ValueError(
                f"{model_name}: has a low-rank adapter, without which its weights compute nonsense, and which vLLM "
                "does not add by itself; use transformers, or train without low_rank"
            )
        held = get_safetensors_params_metadata(model_name, revision=revision)
        for name in held:
            if (values := name.removesuffix(POSITIONS)) != name and values in held:
                axis = packed24_axis(tuple(held[values]["shape"]), tuple(held[name]["shape"]))
                self.transposed[values.removesuffix(".weight")] = axis == -2
        if not self.transposed:
            raise ValueError(f"{model_name}: config.json says {PACKED24}, but no weight has positions; export it again")

    @override
    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.transposed = hf_to_vllm_mapper.apply_dict(self.transposed)

    @override
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer multiplies: packed, or, where the export left it dense, as vLLM does without us.

        Raises:
            ValueError: only a part of a fused layer is packed.
        """
        if isinstance(layer, RoutedExperts):
            experts = prefix[: prefix.rindex("experts") + len("experts")]
            if not any(name.startswith(f"{experts}.") for name in self.transposed):
                return None
            return Packed24Experts(layer.moe_config, prefix)
        if not isinstance(layer, LinearBase):
            return None
        parent, _, leaf = prefix.rpartition(".")
        parts = {**_FUSED, **self.packed_modules_mapping}.get(leaf, [leaf])
        names = [f"{parent}.{part}" for part in parts] if prefix not in self.transposed else [prefix]
        packed = [name for name in names if name in self.transposed]
        if packed and packed != names:
            raise ValueError(
                f"{prefix}: vLLM fuses {', '.join(parts)}, of which only {', '.join(packed)} is packed; exclude all of "
                "them from the pattern or none, or serve the hf export"
            )
        return Packed24LinearMethod(prefix, self.transposed[packed[0]]) if packed else UnquantizedLinearMethod()


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
        _require_whole_bytes(self.prefix, input_size_per_partition, input_size)
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
        parts = zip(layer.weight.data.split(_ROWS), layer.weight_positions.data.split(_ROWS), strict=True)
        try:
            for values, positions in parts:
                unpack24(values, positions)
        except ValueError as error:
            raise ValueError(f"{self.prefix}: {error}") from None

    @override
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = linear24(x, layer.weight, layer.weight_positions, bias)
        return product

    def _turning(self, load: Callable[..., None]) -> Callable[..., None]:
        if not self.transposed:
            return load
        return lambda parameter, loaded, *more: load(parameter, loaded.t(), *more)


class Packed24Experts(UnquantizedFusedMoEMethod):
    """Fused experts that are stored packed: they are loaded as they are stored, and unpacked before the first use."""

    def __init__(self, moe: Any, prefix: str) -> None:
        super().__init__(moe)
        self.prefix = prefix

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
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )
        _require_whole_bytes(self.prefix, intermediate_size_per_partition, self.moe.intermediate_size)
        for name in ("w13_weight", "w2_weight"):
            *rest, inputs = getattr(layer, name).shape
            for suffix, columns, dtype, start in (
                ("", inputs // 2, params_dtype, 0),
                (POSITIONS, -(-inputs // 8), torch.uint8, _EMPTY_GROUPS),  # vLLM may pad, and loads nothing there
            ):
                data = torch.full((*rest, columns), start, dtype=dtype)
                parameter = nn.Parameter(data, requires_grad=False)
                layer.register_parameter(name + suffix, parameter)
                set_weight_attrs(parameter, extra_weight_attrs)

    @override
    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13_weight", "w2_weight"):
            try:
                dense = unpack24(getattr(layer, name).data, getattr(layer, name + POSITIONS).data)
            except ValueError as error:
                raise ValueError(f"{self.prefix}.{name}: {error}") from None
            delattr(layer, name + POSITIONS)
            layer.register_parameter(name, nn.Parameter(dense, requires_grad=False))
        super().process_weights_after_loading(layer)


def _require_whole_bytes(prefix: str, here: int, whole: int) -> None:
    """A byte of positions belongs to eight inputs: a rank cannot hold half of one."""
    if here != whole and here % 8:
        raise ValueError(
            f"{prefix}: its {whole} inputs, divided among tensor-parallel ranks, are {here} each, which is no multiple "
            "of 8, as packed24 needs; use fewer ranks, or serve the hf export"
        )
