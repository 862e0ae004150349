"""Weights that llm-compressor quantized, in dense shapes: the compressed-tensors library turns them back.

A module `m` lies in a folder as `m.weight` in int8 or fp8, or `m.weight_packed`, beside `m.weight_scale` and whatever
its format needs. To whoever reads a folder by `StoredWeights` it is `m.weight` in the dtype of its scale.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec

_WEIGHTS = ("weight_packed", "weight")
_BESIDE = ("scale", "zero_point", "shape", "global_scale", "g_idx")


class QuantizedWeights:
    """The quantized weights of a folder, each by the name that it has in the dense model. Raises ValueError where the
    library is missing, or the folder is not what its config.json says."""

    def __init__(self, folder: Path, config: dict[str, Any], tensors: TensorFolder) -> None:
        if importlib.util.find_spec("compressed_tensors") is None:
            raise ValueError(
                f"{folder}: its weights are quantized, and the library that reads them is missing; pip install "
                "'sparseforge_ds[quantized]'"
            )
        from compressed_tensors.quantization import QuantizationConfig
        from pydantic import ValidationError

        self._folder, self._tensors = folder, tensors
        try:
            known = QuantizationConfig.model_fields
            held = {key: value for key, value in config["quantization_config"].items() if key in known}
            self._config = QuantizationConfig(**held)
        except (ValidationError, TypeError, KeyError) as error:
            raise ValueError(f"{folder}/config.json: its quantization_config is damaged ({error})") from None
        modules = [name.removesuffix(".weight_scale") for name in tensors.specs if name.endswith(".weight_scale")]
        self._parts = {f"{module}.weight": self._stored(module) for module in modules}
        self.belongs = {
            f"{weight.rpartition('.')[0]}.{leaf}" for weight, parts in self._parts.items() for leaf in parts
        }
        """Every tensor of the files that is a part of one."""
        self.specs = {name: self._spec(name) for name in self._parts}
        """Shape and dtype of every quantized weight, dense."""

    def read(self, name: str) -> Tensor:
        """One weight as its kernels see it. A zero is +0.0: what underflows in fp8 keeps its sign there."""
        from compressed_tensors.compressors import BaseCompressor

        module = name.removesuffix(".weight")
        scheme = self._scheme(module)
        held = {leaf: self._tensors.read(f"{module}.{leaf}") for leaf in self._parts[name]}
        try:
            compressor: Any = BaseCompressor.get_value_from_registry(scheme.format or self._config.format)
            weight: Tensor = compressor.decompress(held, scheme)["weight"]
        except (KeyError, ValueError, RuntimeError, AssertionError) as error:
            raise ValueError(f"{self._folder}: {name} cannot be read by compressed-tensors ({error!r:.200})") from None
        if tuple(weight.shape) != self.specs[name].shape:
            raise ValueError(f"{self._folder}: {name} is {tuple(weight.shape)}, its files say {self.specs[name].shape}")
        return weight.to(self.specs[name].dtype) + 0.0

    def _stored(self, module: str) -> list[str]:
        """The names behind the module's of all tensors that its weight is stored in."""
        leaves = [*_WEIGHTS, *(f"weight_{end}" for end in _BESIDE)]
        found = [leaf for leaf in leaves if f"{module}.{leaf}" in self._tensors.specs]
        if not set(found) & set(_WEIGHTS):
            raise ValueError(f"{self._folder}: {module}.weight_scale is there without {module}.weight")
        return found

    def _spec(self, name: str) -> TensorSpec:
        module = name.removesuffix(".weight")
        stored = self._tensors.specs
        dtype = stored[f"{module}.weight_scale"].dtype
        dtype = dtype if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float32
        if f"{module}.weight_shape" in stored:
            return TensorSpec(tuple(self._tensors.read(f"{module}.weight_shape").tolist()), dtype)
        if f"{module}.weight_packed" in stored:  # two fp4 in a byte
            *rest, last = stored[f"{module}.weight_packed"].shape
            return TensorSpec((*rest, 2 * last), dtype)
        return TensorSpec(stored[name].shape, dtype)

    def _scheme(self, module: str) -> Any:
        """Of the groups of config.json the one that names the module, else the one for its class."""
        from compressed_tensors.utils.match import match_name

        schemes = [scheme for scheme in self._config.config_groups.values() if not isinstance(scheme, list)]
        for scheme in schemes:
            if any(match_name(module, target) for target in scheme.targets):
                return scheme
        for scheme in schemes:
            if "Linear" in scheme.targets:
                return scheme
        raise ValueError(f"{self._folder}/config.json: no group of its quantization_config is for {module}")
