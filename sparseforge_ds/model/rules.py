"""Rules that tell by its name whether a matrix is prunable: from a family's rows, or from the class of its layer."""

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
"""Function of a matrix's name that returns its row, or True if it stays dense, or False if nothing is known of it."""

_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def table_rule(family: Family) -> Rule:
    """Return the rule of a family with rows."""

    def rule(name: str) -> Row | bool:
        row = next((row for row in family.prunable if fits_row(name, row.names)), None)
        return row if row is not None else any(fits_row(name, names) for names in (*family.dense, *BRANCH))

    return rule


def layer_rule(model: Any, include: tuple[str, ...]) -> Rule:
    """Return the rule of a model without rows: what `include` chooses from `contracting` is prunable.

    Embeddings and the head stay dense.
    """
    rows = contracting(model)
    not_linear = embeddings_and_head(model)

    def rule(name: str) -> Row | bool:
        if name in rows and matches(name, include):
            return rows[name]
        return name in not_linear or name.rpartition(".")[2] in BRANCH

    return rule


def embeddings_and_head(model: Any) -> set[str]:
    """Return the names of the parameters of all embeddings and of the output head."""
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if (head := _head(model)) is not None:
        modules.append(head)
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def linear_layers(model: Any) -> dict[str, int]:
    """Return the contracted axis of all linear layers but the head, by the name of the weight."""
    return {
        f"{name}.weight": -1 if isinstance(module, nn.Linear) else -2
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not _head(model)
    }


def contracting(model: Any, ungated: bool = False) -> dict[str, Row]:
    """Return a row for each weight whose layer says which axis is contracted: linear layers and fused experts.

    transformers computes experts in several ways, for which most of their modules say whether the weights are
    transposed, and whether gate and up lie end to end.

    Args:
        model: of transformers.
        ungated: add experts without a gate, of which no curvature can be measured.
    """
    rows = {
        name: Row(name, axis, experts=_EXPERT.search(name) is not None) for name, axis in linear_layers(model).items()
    }
    for module_name, module in model.named_modules():
        if getattr(module, "is_transposed", None) is None or not (ungated or module.has_gate):
            continue
        if getattr(module, "has_post_expert_norm", False):  # older releases of transformers have no such experts
            continue
        axis = -2 if module.is_transposed else -1
        for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
            if len(getattr(parameter, "ds_shape", parameter.shape)) == 3:
                halves = axis == -1 and module.is_concatenated and name.endswith(".gate_up_proj")
                rows[name] = Row(name, axis, experts=True, stacked=2 if halves else 1)
    return rows


def fits_row(name: str, names: str) -> bool:
    """Return True if a glob of the table, which may begin behind any dot, names a parameter or a module."""
    return fnmatchcase(f".{name}", f"*.{names}")


def matches(name: str, globs: Iterable[str]) -> bool:
    """Return True if one of a user's globs matches the whole name."""
    return any(fnmatchcase(name, glob) for glob in globs)


def check_globs(
    key: str, globs: Iterable[str], names: Collection[str], all_names: Iterable[str], explain: Callable[[str], str]
) -> None:
    """Reject a glob of `include` or `exclude` that matches no name that it can decide about.

    Args:
        key: "include" or "exclude".
        globs: of that key.
        names: weights that the key decides about.
        all_names: of all parameters.
        explain: says why a parameter cannot be chosen.

    Raises:
        ValueError: a glob matches none of `names`. The message has a parameter that it does match and the explanation,
            or a glob that would match.
    """
    for glob in globs:
        if fnmatch.filter(names, glob):
            continue
        # The glob names something else, or nothing at all.
        if matched := fnmatch.filter(all_names, glob):
            more = f" (and {len(matched) - 1} more)" if len(matched) > 1 else ""
            raise ValueError(
                f"sparseforge.{key}: {glob!r} matches no weight that can be pruned, only {matched[0]}{more}, "
                f"{explain(matched[0])}; {key} chooses from names such as {next(iter(names), 'none')}"
            )
        nearest = max(
            dict.fromkeys(map(name_pattern, names)),
            key=lambda pattern: difflib.SequenceMatcher(None, pattern, glob).find_longest_match().size,
            default=None,
        )
        example = f", for example {nearest!r}" if nearest else ", and this model has none to choose from"
        raise ValueError(
            f"sparseforge.{key}: {glob!r} matches no weight; it is a glob over whole parameter names{example}"
        )


def name_pattern(name: str) -> str:
    """Replace every number between dots in a weight's name by `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _head(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def model_type_of(model: nn.Module) -> str:
    """Return the model's key in the family table, which is `model_type` of its config."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(
            f"{type(model).__name__} has no config.model_type, so its family is not known; "
            "give a transformers model, before deepspeed.initialize wraps it (or engine.module)"
        )
    return str(model_type)
