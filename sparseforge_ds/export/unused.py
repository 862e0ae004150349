"""Tensors in the files of a model that transformers does not load: no export has them, and no check counts them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_OLD = re.compile(r"^mtp\.|\.rotary_emb\.inv_freq$|(?:^|\.)position_ids$|\.attn\.masked_bias$")
"""Layers for the prediction of several tokens, and buffers that older versions of transformers saved."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_OF_TEXT = "language_model."
"""In the names of a model's text half, where it has another, with layers of its own."""
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers")


def divide(tensors: Mapping[str, T], config: dict[str, Any]) -> tuple[dict[str, T], list[str]]:
    """Those of the tensors of a model's files that are part of the model of its config.json; and names of the others:
    the above, and layers behind the last one, where some families keep such as predict several tokens."""
    text = config.get("text_config")
    sizes, inside = (text, _OF_TEXT) if isinstance(text, dict) else (config, "")
    depth = next((sizes[key] for key in _DEPTH if isinstance(sizes.get(key), int)), math.inf)
    unused = [name for name in tensors if _OLD.search(name) or (inside in name and _layer(name) >= depth)]
    left_out = set(unused)
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}, unused


def describe_unused(where: object, unused: Sequence[str]) -> str:
    """What a command tells of them."""
    return f"{where}: {len(unused)} tensors that transformers does not load are left out, the first of them {unused[0]}"


def _layer(name: str) -> int:
    """The number of the decoder layer that a tensor belongs to; -1 where it is in none."""
    found = _LAYER.search(name)
    return -1 if found is None else int(found[1])
