"""The files of a model's folder, which may come from anybody: checked before they are read, copied or uploaded.

A link in such a folder is followed only where it ends in the same folder, or, in a cache of the hub, in the same
repository: its snapshots are made of links into `blobs`. Any other link would carry a file of this machine into an
export.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.folder import check_depth, read_json

CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates of a tokenizer that has several."""
_FOLDERS = (CHAT_TEMPLATES, "permutation")
"""Folders of a model's folder that are read, or copied, with it."""
_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
"""JSON files that transformers parses, which answers one that nests too deeply by a RecursionError."""
_LEGAL_WORDS = ("license", "licence", "notice", "copying", "copyright", "policy", "term", "patent", "attribution")
"""In the names of files that say how a model may be used."""
LEGAL_FILES = tuple(f"*{''.join(f'[{letter.upper()}{letter}]' for letter in word)}*" for word in _LEGAL_WORDS)
"""Patterns of file names that find all of them in a repository, and perhaps others."""
_CODE_OR_WEIGHTS = (".py", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
_AT_LEAST_ONE = (
    *("hidden_size", "n_embd", "d_model", "vocab_size"),
    *("num_attention_heads", "n_head", "num_hidden_layers", "n_layer"),
)
"""Keys of a config.json whose sizes are not 0."""
_MOST = 4096
"""Layers, or experts of a layer, of the largest model. Every one of them is built, also without weights."""


def is_legal_file(name: str) -> bool:
    """Return whether a file states terms of use, like LICENSE, NOTICE or USE_POLICY.md, which stay with the model."""
    words = {word.removesuffix("s") for word in re.split(r"[^a-z]+", name.lower())}
    return not words.isdisjoint(_LEGAL_WORDS) and not name.endswith(_CODE_OR_WEIGHTS)


def check_model_folder(folder: str | Path) -> None:
    """Check what every reader of a model's folder relies on.

    Raises ValueError for a link that leads out of the folder, an index of weights that names a file outside of it, and
    settings that are not readable JSON, or say what no model has.
    """
    folder = Path(folder)
    check_links(folder)
    for index in sorted(folder.glob("*.index.json")):
        read_weight_map(index)
    for name in _SETTINGS:
        if (folder / name).exists():
            content = read_json(folder / name)
            if name == "config.json":
                check_sizes(content, folder / name)


def check_sizes(config: dict[str, Any], where: object) -> None:
    """Check sizes by which transformers divides, and those that decide how long it takes to build a model at all.

    Raises ValueError, which begins with `where`, for sizes below 1, more layers or experts than any model has, and
    deeply nested values.
    """
    check_depth(config)
    parts = [config]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, size in part.items():
            if not isinstance(size, (int, float)):
                continue
            if size < 1 and key in _AT_LEAST_ONE:
                raise ValueError(f"{where}: {key} is {size}; it must be 1 or more")
            if size > _MOST and ("layers" in key or "experts" in key or key == "n_layer"):
                raise ValueError(f"{where}: {key} is {size}, and no model has more than {_MOST}")


def check_links(folder: str | Path, everything: bool = False) -> None:
    """Raise ValueError for a link that leads out of a model's folder, or to a folder.

    Args:
        folder: the model's; it may be a link itself.
        everything: look into every folder below, as an upload does. Otherwise only at what belongs to a model.
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
    """Return the file of every tensor by an index of weights. Raises ValueError where one lies elsewhere."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index}: has no weight_map")
    if (outside := next((file for file in files.values() if Path(file).name != file), None)) is not None:
        raise ValueError(f"{index}: refers to {outside!r}, outside of its folder")
    return files


def _entries(folder: Path, everything: bool) -> Iterator[Path]:
    """Yield files and links of a folder, and of the folders in it that count."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_folder = path.is_dir()
        if not is_folder or everything or path.name in _FOLDERS:
            yield path
        if is_folder and not path.is_symlink() and (everything or path.name in _FOLDERS):
            yield from _entries(path, everything=True)
