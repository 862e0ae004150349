"""What is known of a matrix by its name: by a family's row, or, without one, by the class of its layer."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.model.family_table import BRANCH, Family, Row

Rule = Callable[[str], Row | bool]
"""Name of a matrix -> its row; where it has none, whether it is known that it stays dense."""

_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def table_rule(family: Family) -> Rule:
    """The rule of a family that the table has."""

    def rule(name: str) -> Row | bool:
        row = next((row for row in family.prunable if fits_row(name, row.names)), None)
        return row if row is not None else any(fits_row(name, names) for names in (*family.dense, *BRANCH))

    return rule


def layer_rule(model: Any, include: tuple[str, ...]) -> Rule:
    """For a model of any other family: what `include` names of `contracting`; embeddings and the head stay dense."""
    rows, aside = contracting(model), embeddings_and_head(model)

    def rule(name: str) -> Row | bool:
        if name in rows and matches(name, include):
            return rows[name]
        return name in aside or name.rpartition(".")[2] in BRANCH

    return rule


def embeddings_and_head(model: Any) -> set[str]:
    """Names of their parameters."""
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if (head := _head(model)) is not None:
        modules.append(head)
    aside = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in aside}


def linear_layers(model: Any) -> dict[str, int]:
    """The axis that is contracted, by weight name, of all linear layers but the head."""
    return {
        f"{name}.weight": -1 if isinstance(module, nn.Linear) else -2
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not _head(model)
    }


def contracting(model: Any) -> dict[str, Row]:
    """Weights whose layers say which axis is contracted, by name: of linear layers, and of fused experts.

    transformers' own ways to compute experts need to know how they are stored, so that most modules that hold some say
    whether they are transposed, and whether gate and up lie end to end.
    """
    rows = {
        name: Row(name, axis, experts=_EXPERT.search(name) is not None) for name, axis in linear_layers(model).items()
    }
    for where, module in model.named_modules():
        if getattr(module, "is_transposed", None) is None or not module.has_gate:
            continue
        if getattr(module, "has_post_expert_norm", False):  # older releases of transformers have no such experts
            continue
        axis = -2 if module.is_transposed else -1
        for name, parameter in module.named_parameters(prefix=where, recurse=False):
            if len(getattr(parameter, "ds_shape", parameter.shape)) == 3:
                halves = axis == -1 and module.is_concatenated and name.endswith(".gate_up_proj")
                rows[name] = Row(name, axis, experts=True, stacked=2 if halves else 1)
    return rows


def fits_row(name: str, names: str) -> bool:
    """Whether a glob of the table names a parameter or a module."""
    return fnmatchcase(f".{name}", f"*.{names}")


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether one of a user's globs, over whole names, matches."""
    return any(fnmatchcase(name, glob) for glob in globs)


def check_globs(
    key: str, globs: Iterable[str], names: Collection[str], others: Iterable[str], why: Callable[[str], str]
) -> None:
    """Refuse a glob of `include` or `exclude` that matches none of the names that it can decide about.

    The ValueError says which of the others the glob does match and `why` that does not count, or names a glob that does
    match.
    """
    for glob in globs:
        if fnmatch.filter(names, glob):
            continue
        if hit := fnmatch.filter(others, glob):
            more = f" (and {len(hit) - 1} more)" if len(hit) > 1 else ""
            raise ValueError(
                f"sparseforge.{key}: {glob!r} matches no weight that can be pruned, only {hit[0]}{more}, "
                f"{why(hit[0])}; {key} chooses from names such as {next(iter(names), 'none')}"
            )
        near = max(
            dict.fromkeys(map(name_pattern, names)),
            key=lambda pattern: difflib.SequenceMatcher(None, pattern, glob).find_longest_match().size,
            default=None,
        )
        example = f", for example {near!r}" if near else ", and this model has none to choose from"
        raise ValueError(
            f"sparseforge.{key}: {glob!r} matches no weight; it is a glob over whole parameter names{example}"
        )


def name_pattern(name: str) -> str:
    """A weight's name with every number in it left open."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _head(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def model_type_of(model: nn.Module) -> str:
    """Key of the family table."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(
            f"{type(model).__name__} has no config.model_type, so its family is not known; "
            "give a transformers model, before deepspeed.initialize wraps it (or engine.module)"
        )
    return str(model_type)
