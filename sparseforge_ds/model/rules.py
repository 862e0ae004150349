"""What is known of a matrix by its name: by a family's row, or, without one, by the class of its layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.model.family_table import LOW_RANK, Family, Row

Rule = Callable[[str], Row | bool]
"""Name of a matrix -> its row; where it has none, whether it is known that it stays dense."""

_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def by_table(family: Family) -> Rule:
    """The rule of a family that the table has."""

    def rule(name: str) -> Row | bool:
        row = next((row for row in family.prunable if is_row(name, row.names)), None)
        return row if row is not None else any(is_row(name, names) for names in (*family.dense, LOW_RANK))

    return rule


def by_modules(model: Any, include: tuple[str, ...]) -> Rule:
    """For a model of any other family: linear layers that `include` names; embeddings and the head stay dense."""
    linear = linear_layers(model)
    dense = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    dense |= {f"{name}.weight" for name, module in model.named_modules() if module is _head(model)}

    def rule(name: str) -> Row | bool:
        if name in linear and matches(name, include):
            return Row(name, linear[name], experts=_EXPERT.search(name) is not None)
        return name in dense or name.rpartition(".")[2] == LOW_RANK

    return rule


def linear_layers(model: Any) -> dict[str, int]:
    """The axis that is contracted, by weight name, of all linear layers but the head."""
    return {
        f"{name}.weight": -1 if isinstance(module, nn.Linear) else -2
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not _head(model)
    }


def is_row(name: str, names: str) -> bool:
    """Whether a glob of the table names a parameter or a module."""
    return fnmatchcase(f".{name}", f"*.{names}")


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether one of a user's globs, over whole names, matches."""
    return any(fnmatchcase(name, glob) for glob in globs)


def matches_any(names: Iterable[str], glob: str) -> bool:
    """Whether a user's glob matches one of the names."""
    return any(fnmatchcase(name, glob) for name in names)


def _head(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def model_type_of(model: nn.Module) -> str:
    """Key of the family table.

    Raises:
        ValueError: the model does not say.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(
            f"{type(model).__name__} has no config.model_type, so its family is not known; "
            "give a transformers model, before deepspeed.initialize wraps it (or engine.module)"
        )
    return str(model_type)
