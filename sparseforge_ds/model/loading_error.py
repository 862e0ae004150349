"""One-line reasons for failures of transformers to load something, with the cure."""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

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
            f"sparseforge consolidate {shlex.quote(str(folder))} OUT"
        )
    if factors := [key for key in names if key.endswith(f".{SCALE}")]:
        return (
            f"has factors of outputs, {min(factors)} among them, which transformers leaves out; write the whole model "
            "from a checkpoint of the run, by sparseforge consolidate, or by the tool that made the folder"
        )
    return None


def check_loading_report(report: Mapping[str, Any], who: str, folder: object) -> None:
    """Raise ValueError unless the files have every weight of the model in its shape, and no part that is left out.

    Args:
        report: second result of `from_pretrained` with `output_loading_info` and `ignore_mismatched_sizes`.
        who: beginning of the message.
        folder: of the model, or its hub id.
    """
    if (lost := describe_lost_parts(report["unexpected_keys"], folder)) is not None:
        raise ValueError(f"{who}: {lost}")
    # transformers fills weights that the files lack, or have in another shape, with random numbers.
    if missing := sorted(report["missing_keys"]):
        others = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        raise ValueError(
            f"{who}: the files hold no {', '.join(missing[:3])}{others}; config.json and weights do not belong together"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        weight, stored, built = mismatched[0]
        raise ValueError(
            f"{who}: {weight} has the shape {tuple(stored)} in the files, and by config.json {tuple(built)}; put back "
            "the config.json that the weights were saved with"
        )
