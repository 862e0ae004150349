"""One-line reasons for failures of transformers to load something, with the cure."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

from sparseforge_ds.model.family_table import BRANCH, SCALE

_OWN_CODE = "trust_remote_code"
"""Word in every refusal of transformers to run a folder's own code."""


def reason(error: BaseException) -> str:
    """Return the first line of an error, or our own words if it advises to run code.

    Every load of a config, tokenizer or model passes `trust_remote_code=False`: transformers would otherwise ask on the
    terminal, and run Python files of the model's folder or repository for a `y`.
    """
    if _OWN_CODE in str(error):
        return (
            "it needs Python code of its own (auto_map in its JSON files), which transformers has no class for, and no "
            "remote code is run here; give a model of a family that transformers has, or, if this is one of those "
            "under another name, write its model_type (or tokenizer_class) there and delete auto_map"
        )
    if isinstance(error, pickle.UnpicklingError):
        return (
            "a file of it is a pickle of more than tensors, which could run any code and is not opened here; give its "
            "weights in safetensors files"
        )
    if isinstance(error, KeyError):  # its text is the key alone
        return f"KeyError: {error}"[:300]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":"):  # huggingface_hub puts a headline before the reason
        lines[0] = " ".join(" ".join(lines).split())
    return lines[0][:300]


def describe_lost_parts(names: Iterable[str], folder: object) -> str | None:
    """Return why transformers loads a model without its low-rank branches or CAST's factors; None if it has neither.

    Args:
        names: tensors of the files, all of them or those that have no place in the model. Files that another library
            quantized have scales of the same name as factors.
        folder: of the model, or its hub id.
    """
    names = list(names)
    if branches := [key for key in names if key.endswith(BRANCH)]:
        return (
            f"has low-rank branches, {min(branches)} among them, which transformers leaves out; write the whole model: "
            f"sparseforge consolidate {folder} OUT"
        )
    if factors := [key for key in names if key.endswith(f".{SCALE}")]:
        return (
            f"has factors of outputs, {min(factors)} among them, which transformers leaves out; write the whole model "
            "from a checkpoint of the run, by sparseforge consolidate, or by the tool that made the folder"
        )
    return None
