"""Weights that llm-compressor quantized, dequantized by the compressed-tensors library.

A module `m` lies in a folder as `m.weight` in int8 or fp8, or as `m.weight_packed`, beside `m.weight_scale` and
whatever its format needs. `StoredWeights` shows it as `m.weight`, dense, in the dtype of its scale.
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
    """Quantized weights of a folder, by their names in the dense model."""

    def __init__(self, folder: Path, config: dict[str, Any], tensors: TensorFolder) -> None:
        """Find the weights.

        Args:
            folder: for messages.
            config: content of its config.json.
            tensors: of its files.

        Raises:
            ValueError: the library is missing, or the folder is not what its config.json says.
        """
        if importlib.util.find_spec("compressed_tensors") is None:
            raise ValueError(
                f"{folder}: its weights are quantized, and the library that reads them is missing; pip install "
                "'sparseforge_ds[quantized]'"
            )
        from compressed_tensors.quantization import QuantizationConfig
        from pydantic import ValidationError

        self._folder = folder
        self._tensors = tensors
        try:
            known = QuantizationConfig.model_fields
            settings = {key: value for key, value in config["quantization_config"].items() if key in known}
            self._config = QuantizationConfig(**settings)
        except (ValidationError, TypeError, KeyError) as error:
            raise ValueError(f"{folder}/config.json: its quantization_config is damaged ({error})") from None
        # Every quantized weight has a scale beside it.
        modules = [name.removesuffix(".weight_scale") for name in tensors.specs if name.endswith(".weight_scale")]
        self._parts = {f"{module}.weight": self._stored(module) for module in modules}
        self.belongs = {
            f"{weight.rpartition('.')[0]}.{leaf}" for weight, parts in self._parts.items() for leaf in parts
        }
        """Names of all tensors in the files that are parts of quantized weights."""
        self.specs = {name: self._spec(name) for name in self._parts}
        """Shape and dtype of every quantized weight, dense."""

    def read(self, name: str) -> Tensor:
        """Return one weight as its kernels see it, dense, with +0.0 for every zero.

        A value that underflows in fp8 would keep its sign.
        """
        from compressed_tensors.compressors import BaseCompressor

        module = name.removesuffix(".weight")
        scheme = self._scheme(module)
        parts = {leaf: self._tensors.read(f"{module}.{leaf}") for leaf in self._parts[name]}
        try:
            compressor: Any = BaseCompressor.get_value_from_registry(scheme.format or self._config.format)
            weight: Tensor = compressor.decompress(parts, scheme)["weight"]
        except (KeyError, ValueError, RuntimeError, AssertionError) as error:
            raise ValueError(f"{self._folder}: {name} cannot be read by compressed-tensors ({error!r:.200})") from None
        if tuple(weight.shape) != self.specs[name].shape:
            raise ValueError(f"{self._folder}: {name} is {tuple(weight.shape)}, its files say {self.specs[name].shape}")
        return weight.to(self.specs[name].dtype) + 0.0

    def _stored(self, module: str) -> list[str]:
        """Return the last parts of the names of all tensors that a module's weight is stored in."""
        known = [*_WEIGHTS, *(f"weight_{end}" for end in _BESIDE)]
        leaves = [leaf for leaf in known if f"{module}.{leaf}" in self._tensors.specs]
        if not set(leaves) & set(_WEIGHTS):
            raise ValueError(f"{self._folder}: {module}.weight_scale is there without {module}.weight")
        return leaves

    def _spec(self, name: str) -> TensorSpec:
        """Return the dense shape and dtype of a weight."""
        module = name.removesuffix(".weight")
        stored = self._tensors.specs
        dtype = stored[f"{module}.weight_scale"].dtype
        dtype = dtype if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float32
        if f"{module}.weight_shape" in stored:
            return TensorSpec(tuple(self._tensors.read(f"{module}.weight_shape").tolist()), dtype)
        if f"{module}.weight_packed" in stored:  # a byte holds two fp4
            *rest, last = stored[f"{module}.weight_packed"].shape
            return TensorSpec((*rest, 2 * last), dtype)
        return TensorSpec(stored[name].shape, dtype)

    def _scheme(self, module: str) -> Any:
        """Return the group of config.json that names the module, else the one for its class."""
        from compressed_tensors.utils.match import match_name

        schemes = [scheme for scheme in self._config.config_groups.values() if not isinstance(scheme, list)]
        for scheme in schemes:
            if any(match_name(module, target) for target in scheme.targets):
                return scheme
        for scheme in schemes:
            if "Linear" in scheme.targets:
                return scheme
        raise ValueError(f"{self._folder}/config.json: no group of its quantization_config is for {module}")
