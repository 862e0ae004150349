"""What is known of a matrix by its name: by a family's row, or, without one, by the class of its layer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
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


def check_chosen(
    config: SparseForgeConfig,
    shapes: Mapping[str, tuple[int, ...]],
    prunable: Collection[str],
    unnamed: Collection[str],
    fused_name: Mapping[str, str],
    choosable: Collection[str] | None,
) -> None:
    """Refuse a glob of `include` or `exclude` that matches nothing that it can decide about.

    Args:
        config: has the globs.
        shapes: of every parameter.
        prunable: the weights that may go under a mask.
        unnamed: matrices of which nothing is known.
        fused_name: the name that the globs mean where it is another one.
        choosable: the weights that `include` decides about, in a family without rows; None: the prunable ones.

    Raises:
        ValueError: what the glob does match and why that does not count, or a glob that does match.
    """

    def why(name: str) -> str:
        if len(shapes[name]) < 2:
            return "which is a vector: only matrices are pruned"
        if name not in unnamed:
            return "which stays dense, as embeddings, heads and routers do"
        if choosable is None:
            return "which no row of the family table names"
        return "which is no linear layer, so that the axis which it contracts is not known"

    candidates = prunable if choosable is None else choosable
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    for key, globs, chosen_from in (("include", config.include, candidates), ("exclude", config.exclude, matrices)):
        names = [fused_name.get(name, name) for name in chosen_from]
        for glob in globs:
            if matches_any(names, glob):
                continue
            hit = [name for name in shapes if fnmatchcase(fused_name.get(name, name), glob)]
            if hit:
                more = f" (and {len(hit) - 1} more)" if len(hit) > 1 else ""
                raise ValueError(
                    f"sparseforge.{key}: {glob!r} matches no weight that can be pruned, only {hit[0]}{more}, "
                    f"{why(hit[0])}; {key} chooses from names such as {next(iter(names), 'none')}"
                )
            example = f", for example {_near(glob, names)!r}" if names else ", and this model has none to choose from"
            raise ValueError(
                f"sparseforge.{key}: {glob!r} matches no weight; it is a glob over whole parameter names{example}"
            )


def _near(glob: str, names: Collection[str]) -> str:
    """A glob that matches, most like one that does not."""
    core = glob.strip("*.")
    tried = (f"*.{core}.*", f"*.{core}", f"{core}.*", f"*{core}*") if core else ()
    found = next((each for each in tried if matches_any(names, each)), None)
    if found is not None:
        return found
    words = [word for word in re.split(r"[.*]+", core.lower()) if word not in ("weight", "")]

    def likeness(pattern: str) -> float:
        parts = pattern.lower().split(".")
        return sum(max(difflib.SequenceMatcher(None, word, part).ratio() for part in parts) for word in words)

    return max(dict.fromkeys(name_pattern(name) for name in names), key=likeness)


def name_pattern(name: str) -> str:
    """A weight's name with every number in it left open."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


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
