"""The files of a model's folder, which may come from anybody: checked before they are read, copied or uploaded.

A link in such a folder is followed only where it ends in the same folder, or, in a cache of the hub, in the same
repository: its snapshots are made of links into `blobs`. Any other link would carry a file of this machine into an
export.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from sparseforge_ds.checkpoint.folder import check_depth, read_json_object

CHAT_TEMPLATES = "additional_chat_templates"
"""Name of the folder of chat templates of a tokenizer that has several."""
_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
"""Names of JSON files that transformers parses, with a RecursionError if one nests too deeply."""
_LEGAL_WORDS = ("license", "licence", "notice", "copying", "copyright", "policy", "term", "patent", "attribution")
"""Words in the names of files that state terms of use."""
LEGAL_FILES = tuple(f"*{''.join(f'[{letter.upper()}{letter}]' for letter in word)}*" for word in _LEGAL_WORDS)
"""Glob patterns that match all such files of a repository, and perhaps more."""
_CODE_OR_WEIGHTS = (
    *(".py", ".pkl", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt"),
    *(".onnx", ".h5", ".npz", ".msgpack", ".tflite"),
)
_AT_LEAST_ONE = (
    *("hidden_size", "n_embd", "d_model", "vocab_size"),
    *("num_attention_heads", "n_head", "num_hidden_layers", "n_layer"),
)
"""Keys of a config.json whose sizes are at least 1."""
_MOST = 4096
"""Most layers, or experts of a layer, of any model. Every one of them is built, also without weights."""
_WIDTHS = ("_size", "_dim", "_width")
"""Ends of keys that are widths, and count no layers or experts."""


def is_legal_file(name: str) -> bool:
    """Return whether a file states terms of use, like LICENSE, NOTICE or USE_POLICY.md, which stay with the model."""
    words = {word.removesuffix("s") for word in re.split(r"[^a-z]+", name.lower())}
    return not words.isdisjoint(_LEGAL_WORDS) and not name.endswith(_CODE_OR_WEIGHTS)


def check_model_folder(folder: str | Path) -> None:
    """Check links, indices of weights and settings of a model's folder, before any reader uses them.

    Raises:
        ValueError: a link leads out of the folder, an index of weights names a file outside of it, or settings are not
            readable JSON or have impossible sizes or ids of tokens.
    """
    folder = Path(folder)
    check_links(folder)
    for index in sorted(folder.glob("*.index.json")):
        read_weight_map(index)
    for name in _SETTINGS:
        if (folder / name).exists():
            content = read_json_object(folder / name)
            if name == "config.json":
                check_config(content, folder / name)
            if name == "generation_config.json":
                _check_token_ids(content, folder / name)


def _check_token_ids(settings: dict[str, Any], where: Path) -> None:
    """Raise ValueError for an id of special tokens that is no integer, list of integers or null."""
    for key, value in settings.items():
        ids = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and value is not None and not all(type(number) is int for number in ids):
            raise ValueError(f"{where}: {key} is {value!r:.100}; use an integer, a list of integers, or null")


def check_config(config: dict[str, Any], where: object) -> None:
    """Check sizes that would make transformers divide by 0 or build a model for hours, and names of code on the hub.

    Args:
        config: content of a config.json.
        where: beginning of error messages.

    Raises:
        ValueError: a size is below 1, there are more layers or experts than any model has, values nest deeply, or a
            kernel of the hub is named, which transformers would download and run; or `quantization_config` is no JSON
            object.
    """
    check_depth(config)
    sections = [config]
    while sections:
        section = sections.pop()
        sections += [value for value in section.values() if isinstance(value, dict)]
        for key, value in section.items():
            if key.endswith("_implementation") and "/" in (named := json.dumps(value)):
                raise ValueError(
                    f"{where}: {key} is {named:.100}, whose code would be downloaded and run; remove the key"
                )
            if key == "quantization_config" and not isinstance(value, (dict, NoneType)):
                raise ValueError(
                    f"{where}: quantization_config is {value!r:.100}, and no JSON object; remove it if the weights are "
                    "dense, or download the model again"
                )
            if not isinstance(value, (int, float)):
                continue
            if value < 1 and key in _AT_LEAST_ONE:
                raise ValueError(f"{where}: {key} is {value}; it must be 1 or more")
            # Doge has a number of experts where it has none, and says so.
            is_built = "layers" in key or key == "n_layer" or ("experts" in key and section.get("is_moe") is not False)
            if value > _MOST and is_built and not key.endswith(_WIDTHS):
                raise ValueError(f"{where}: {key} is {value}, and no model has more than {_MOST}")


def check_links(folder: str | Path, everything: bool = False) -> None:
    """Raise ValueError for a link that leads out of a model's folder, or to a folder.

    Args:
        folder: model's folder; it may be a link itself.
        everything: check all folders below, as an upload needs, not only those that belong to a model.
    """
    folder = Path(folder)
    root = Path(os.path.realpath(folder))
    repository = root.parent.parent
    if root.parent.name == "snapshots" and repository.name.startswith("models--"):
        root = repository
    for path in _entries(folder, everything):
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root) or (path.is_symlink() and path.is_dir()):
            raise ValueError(
                f"{path}: is a link to {target}, which is no file of the model's folder, and is not followed; put the "
                "file itself in its place, or remove the link"
            )


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of every tensor in an index of weights.

    Raises:
        ValueError: the index is not one, or names a file outside of its folder.
    """
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index}: has no weight_map")
    if (outside := next((file for file in files.values() if Path(file).name != file), None)) is not None:
        raise ValueError(f"{index}: refers to {outside!r}, outside of its folder")
    return files


def _entries(folder: Path, everything: bool) -> Iterator[Path]:
    """Yield files and links of a folder, and of the folders below that belong to a model, or of all of them."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_folder = path.is_dir()
        if not is_folder or everything or path.name == CHAT_TEMPLATES:
            yield path
        if is_folder and not path.is_symlink() and (everything or path.name == CHAT_TEMPLATES):
            yield from _entries(path, everything=True)
