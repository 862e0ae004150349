"""Tensors in a model's files that transformers does not load: exports leave them out, and checks do not count them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_OLD = re.compile(r"^mtp\.|\.rotary_emb\.inv_freq$|(?:^|\.)position_ids$|\.attn\.masked_bias$")
"""Layers for the prediction of several tokens, and buffers that older versions of transformers saved."""
_SEEING = re.compile(r"^(?:model\.)?(?:visual|vision_\w+|multi_modal_projector)\.")
"""Parts of a vision-language model beside its text model."""
_OF_TEXT = "_text"
"""Part of the `model_type` of a text model that transformers also has as a part of a vision-language model."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_TEXT_MODEL = "language_model."
"""Part of the names in the text model of a vision-language model, whose vision model has layers of its own."""
_HALF = re.compile(r"(?:^|\.)(?:encoder|decoder)\.")
"""Part of the names in an encoder and a decoder, which may have different numbers of layers."""
_DEPTHS_OF_HALVES = {"encoder_layers", "decoder_layers"}
"""Keys of config.json in their place, of which one is read as `num_hidden_layers`."""
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
"""Keys of config.json for the number of layers."""


def divide(tensors: Mapping[str, T], config: dict[str, Any]) -> tuple[dict[str, T], list[str]]:
    """Divide the tensors of a model's files into those of the model of its config.json and unused ones.

    Unused are old buffers, and layers behind the last one, in which some families predict several tokens. So are the
    parts that see, where the model is the text model alone.

    Args:
        tensors: by name; values are passed on.
        config: content of config.json, as transformers takes it (`export.source.config_as_loaded`).

    Returns:
        The tensors of the model, and the names of the unused ones.
    """
    text_config = config.get("text_config")
    sizes = text_config if isinstance(text_config, dict) else config
    infix = _TEXT_MODEL if isinstance(text_config, dict) else ""
    depth = next((sizes[key] for key in _DEPTH if isinstance(sizes.get(key), int)), math.inf)
    sees = _OF_TEXT not in str(config.get("model_type"))
    halves = None if _DEPTHS_OF_HALVES.isdisjoint(sizes) else _HALF
    unused = [
        name
        for name in tensors
        if _OLD.search(name)
        or (not sees and _SEEING.search(name))
        or (infix in name and not (halves and halves.search(name)) and _layer(name) >= depth)
    ]
    left_out = set(unused)
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}, unused


def describe_unused(folder: object, unused: Sequence[str]) -> str:
    """Return the sentence in which a command reports unused tensors of a folder."""
    return f"{folder}: {len(unused)} tensors that transformers does not load are left out, the first is {unused[0]}"


def _layer(name: str) -> int:
    """Return the number of the decoder layer that a tensor belongs to, or -1 if it is in none."""
    match = _LAYER.search(name)
    return -1 if match is None else int(match[1])
