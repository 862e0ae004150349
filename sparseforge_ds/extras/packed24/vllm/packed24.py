"""The packed24 format as vLLM wants a format: what its folder says, and which layers have it.

A linear layer, fused ones like qkv and gate-up included, holds the values and positions of its part of the rows or
columns and calls `linear24`; the experts of a layer hold theirs together and call `experts24`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.transformers_utils.config import get_safetensors_params_metadata

from sparseforge_ds.extras.packed24.vllm.experts import Packed24ExpertsMethod
from sparseforge_ds.extras.packed24.vllm.linear import Packed24LinearMethod
from sparseforge_ds.packed_format.packed_values import SCALE, require_grid
from sparseforge_ds.packed_format.packing import (
    PACKED24,
    PACKED24_FORMAT,
    POSITIONS,
    packed24_axis,
    require_scale_shape,
    require_stored_dtypes,
)

_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Fused layers that are usual in vLLM, for a model that lists none."""


class Packed24VLLMConfig(QuantizationConfig):
    """The `quantization_config` of a packed24 folder, as vLLM holds it. It is pickled for vLLM's other processes.

    Args:
        format: version of the storage.
        values: a key of `GRIDS` for rounded values; None for values in the model's dtype.
        group_size: with `values` int4 the kept values that share a scale; None for all of a row.

    Raises:
        ValueError: a format that this version does not know.
    """

    def __init__(self, format: int = PACKED24_FORMAT, values: str | None = None, group_size: int | None = None) -> None:
        super().__init__()
        if format != PACKED24_FORMAT:
            raise ValueError(
                f"{PACKED24}: format {format!r} is not what this version of sparseforge_ds reads (format "
                f"{PACKED24_FORMAT}); upgrade it, or export again"
            )
        self.grid = require_grid(values, group_size)
        self.transposed: dict[str, bool] = {}
        """Packed modules, True for those whose inputs are the first axis, as in GPT-2."""

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
        return cls(config.get("format", PACKED24_FORMAT), config.get("values"), config.get("group_size"))

    @override
    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read from the headers of the weights which modules are packed.

        Raises:
            ValueError: none is, one is stored in a dtype that no packed weight has, or a low-rank adapter belongs to
                the weights.
        """
        if (Path(model_name) / "adapter_config.json").is_file():
            raise ValueError(
                f"{model_name}: has a low-rank adapter, without which its weights compute nonsense, and which vLLM "
                "does not add by itself; use transformers, or train without low_rank"
            )
        headers = get_safetensors_params_metadata(model_name, revision=revision)
        for name in headers:
            if (values := name.removesuffix(POSITIONS)) != name and values in headers:
                scale = headers.get(values + SCALE, {}).get("dtype")
                # vLLM would cast what has another dtype.
                require_stored_dtypes(values, headers[values]["dtype"], headers[name]["dtype"], scale, self.grid)
                shapes = (tuple(headers[values]["shape"]), tuple(headers[name]["shape"]))
                axis = packed24_axis(*shapes, None if self.grid is None else self.grid.dtype)
                if self.grid is not None:
                    require_scale_shape(shapes[0], tuple(headers[values + SCALE]["shape"]), axis, self.grid)
                self.transposed[values.removesuffix(".weight")] = axis == -2
        if not self.transposed:
            raise ValueError(f"{model_name}: config.json says {PACKED24}, but no weight has positions; export it again")

    @override
    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.transposed = hf_to_vllm_mapper.apply_dict(self.transposed)

    @override
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer: packed, or vLLM's own if the export has left it dense.

        Raises:
            ValueError: only a part of a fused layer is packed.
        """
        if isinstance(layer, RoutedExperts):
            experts = prefix[: prefix.rindex("experts") + len("experts")]
            if not any(name.startswith(f"{experts}.") for name in self.transposed):
                return None
            return Packed24ExpertsMethod(layer.moe_config, prefix, self.grid)
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
        if not packed:
            return UnquantizedLinearMethod()
        return Packed24LinearMethod(prefix, self.transposed[packed[0]], self.grid)
