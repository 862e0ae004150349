"""Storage of a folder's weights, as its config.json describes it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sparseforge_ds.packed_format.packing import PACKED24

QUANT_METHOD = "compressed-tensors"
"""Name of llm-compressor's library in a config.json."""


def is_packed_config(config: dict[str, Any]) -> bool:
    """Return True if a config.json is of a packed24 folder."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == PACKED24


def is_quantized(config: dict[str, Any]) -> bool:
    """Return True if a config.json is of a folder that llm-compressor quantized."""
    return _is_of_library(config) and not is_only_pruned(config)


def is_only_pruned(config: dict[str, Any]) -> bool:
    """Return True if a config.json is of a folder that llm-compressor pruned, with weights in ordinary tensors."""
    quantization = config.get("quantization_config", {})
    return _is_of_library(config) and quantization.get("format") == "dense" and not quantization.get("config_groups")


def _is_of_library(config: dict[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD


def configured_dtype(config: dict[str, Any]) -> str | None:
    """Return the dtype in a config.json, or None. Vision-language models may keep it under `text_config`."""
    text_config = config.get("text_config")
    parts = (config, text_config if isinstance(text_config, dict) else {})
    dtypes = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next((str(dtype) for dtype in dtypes if dtype is not None), None)


def config_sha256(config: dict[str, Any]) -> str:
    """Return the sha256 of a config.json without the keys about storage and remote code.

    It is the same for a run and all its exports.
    """
    left_out = ("dtype", "torch_dtype", "quantization_config", "auto_map")
    content = {key: value for key, value in config.items() if key not in left_out}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
