"""Weights in formats of the compressed-tensors library: reading of all, and writing of `pack-quantized`.

llm-compressor writes them too. A module `m` lies in a folder as `m.weight` in int8 or fp8, or as `m.weight_packed`,
beside `m.weight_scale` and whatever its format needs. `StoredWeights` shows it as `m.weight`, dense, in the dtype of
its scale.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec
from sparseforge_ds.config import QuantizeConfig
from sparseforge_ds.model.stored_config import QUANT_METHOD

_WEIGHTS = ("weight_packed", "weight")
_BESIDE = ("scale", "zero_point", "shape", "global_scale", "g_idx")
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of scales that are the dtype of the dequantized weight."""
WRITTEN_BITS = (4, 8)
"""Bits of a code in `pack-quantized` folders that vLLM reads, too."""


def quantization_config(settings: QuantizeConfig, size: int | None, ignore: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a folder whose linear layers have quantized weights alone.

    Args:
        settings: of the grid.
        size: inputs that share a scale; None for all of an output.
        ignore: names of linear layers whose weights are not quantized.
    """
    strategy = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    weights = {"num_bits": settings.bits, "type": "int", "symmetric": True, "dynamic": False, **strategy}
    return {
        "quant_method": QUANT_METHOD,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignore,
    }


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, int]:
    """Return the shape of `pack_codes` of an (out, in) weight."""
    return shape[0], -(-shape[1] * bits // 32)


def pack_codes(code_OI: Tensor, bits: int) -> Tensor:
    """Pack codes, each plus 2^(bits - 1), into words of 32 bits along the inputs, the first in the lowest bits.

    Args:
        code_OI: (out, in) int8.
        bits: of a code, a divisor of 32.

    Returns:
        (out, ceil(in * bits / 32)) int32.
    """
    per_word = 32 // bits
    shifted_OI = code_OI.long() + (1 << (bits - 1))
    padded_OI = torch.nn.functional.pad(shifted_OI, (0, -code_OI.shape[1] % per_word))
    word_OWP = padded_OI.unflatten(1, (-1, per_word)) << (bits * torch.arange(per_word))
    return word_OWP.sum(dim=2).to(torch.uint32).view(torch.int32)


def require_library(where: str, purpose: str) -> None:
    """Raise ValueError if the compressed-tensors library is missing."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise ValueError(f"{where}: {purpose} is missing; in the checkout pip install '.[quantized]'")


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
        require_library(str(folder), "its weights are quantized, and the library that reads them")
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
        # A scale of 0 or NaN would make weights that no check of a pattern notices.
        scale = parts["weight_scale"]
        if scale.dtype in SCALE_DTYPES and not bool(((scale > 0) & scale.isfinite()).all()):
            odd = scale[~((scale > 0) & scale.isfinite())]
            raise ValueError(
                f"{self._folder}: {name}: scales are positive and finite, and {len(odd)} are not, first "
                f"{odd[0].item()}; download or export it again"
            )
        # The library of the format reads the codes.
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
        dtype = dtype if dtype in SCALE_DTYPES else torch.float32
        if f"{module}.weight_shape" in stored:
            sizes = self._tensors.read(f"{module}.weight_shape")
            if sizes.ndim != 1 or len(sizes) < 2 or sizes.is_floating_point():
                raise ValueError(
                    f"{self._folder}: {module}.weight_shape is {sizes.dtype} of shape {tuple(sizes.shape)}, and it is "
                    "the integers of a shape; download or export it again"
                )
            shape = tuple(sizes.tolist())
            self._require_packed(module, shape)
            return TensorSpec(shape, dtype)
        if f"{module}.weight_packed" in stored:  # a byte holds two fp4
            *rest, last = stored[f"{module}.weight_packed"].shape
            return TensorSpec((*rest, 2 * last), dtype)
        return TensorSpec(stored[name].shape, dtype)

    def _require_packed(self, module: str, shape: tuple[int, ...]) -> None:
        """Check the headers of packed integers before anything of the weight's size is allocated.

        Raises:
            ValueError: codes or scales have not the dtype or shape that config.json and the weight's shape give them.
        """
        settings = self._scheme(module).weights
        if settings is None or str(settings.type) not in ("int", "QuantizationType.INT"):
            return
        # Shapes and dtypes follow from the weight's shape and the settings.
        where = f"{self._folder}: {module}"
        inputs = shape[-1]
        size = settings.group_size or 0
        if size > 0 and inputs % size:
            raise ValueError(f"{where}.weight has {inputs} inputs, and groups of {size} do not divide them")
        expected = {
            "weight_packed": ((*shape[:-1], -(-inputs * settings.num_bits // 32)), (torch.int32,)),
            "weight_scale": ((*shape[:-1], inputs // size if size > 0 else 1), SCALE_DTYPES),
        }
        if str(settings.strategy) in ("tensor", "QuantizationStrategy.TENSOR"):
            expected["weight_scale"] = ((1,), SCALE_DTYPES)
        # Headers must say the same; a tensor that is missing is named where it is read.
        for leaf, (expected_shape, dtypes) in expected.items():
            spec = self._tensors.specs.get(f"{module}.{leaf}")
            if spec is not None and (spec.shape != expected_shape or spec.dtype not in dtypes):
                raise ValueError(
                    f"{where}.{leaf} is {spec.dtype} of shape {spec.shape}, and for {settings.num_bits} bits of a "
                    f"weight of {shape} it is {dtypes[0]} of {expected_shape}; download or export it again"
                )

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
