"""The storage of a folder's weights as its config.json describes it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sparseforge_ds.mask.packing import PACKED24

QUANT_METHOD = "compressed-tensors"


def is_packed(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a packed24 folder."""
    held = config.get("quantization_config")
    return isinstance(held, dict) and held.get("quant_method") == PACKED24


def is_quantized(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a folder in one of the library's formats."""
    return _is_of_library(config) and not is_only_pruned(config)


def is_only_pruned(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a folder that llm-compressor pruned, and whose weights are ordinary tensors."""
    held = config.get("quantization_config", {})
    return _is_of_library(config) and held.get("format") == "dense" and not held.get("config_groups")


def _is_of_library(config: dict[str, Any]) -> bool:
    held = config.get("quantization_config")
    return isinstance(held, dict) and held.get("quant_method") == QUANT_METHOD


def config_sha256(config: dict[str, Any]) -> str:
    """sha256 of what a config.json says, apart from how the weights are stored and which remote code there once was.
    Equal for a run and all its exports."""
    left_out = ("dtype", "torch_dtype", "quantization_config", "auto_map")
    content = {key: value for key, value in config.items() if key not in left_out}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
