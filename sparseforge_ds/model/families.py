"""What is prunable in a model, by the table of families.

A matrix that no row names is never skipped in silence: half of a model that is quietly left dense is the most expensive
kind of bug here. `model.uncovered` refuses a model with more than a little of that. In a family that the table does not
have, nothing is taken for granted: linear layers are pruned where `include` names them, along the axis that their class
contracts, and stay dense where it does not. Of what is no linear layer, like fused experts, `include` decides nothing.

Nothing in this file needs weights: names and full shapes are enough, so the offline tools use the same table. Under
ZeRO-3 a partitioned parameter has an empty tensor; DeepSpeed keeps its full shape in `ds_shape`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.coverage import Coverage
from sparseforge_ds.model.family_table import FAMILIES, LOW_RANK, Family, Row
from sparseforge_ds.model.rules import (
    Rule,
    by_modules,
    by_table,
    check_chosen,
    linear_layers,
    matches,
    matches_any,
    model_type_of,
    name_pattern,
)
from sparseforge_ds.model.uncovered import Uncovered


@dataclass(frozen=True)
class PrunableWeight:
    """One weight under a mask."""

    name: str
    """As in `model.named_parameters()`."""
    shape: tuple[int, ...]
    """Full shape, also under ZeRO-3; (out, in), (in, out) or (experts, out, in)."""
    input_axis: int
    """Negative: -1 when the input axis is last, -2 when it is the last but one."""
    module: str
    """Name of the module that holds the parameter, as in `model.get_submodule`."""
    experts: int = 0
    """Routed experts in this weight: 0 when every token sees it, 1 for an expert in a list, else the first axis."""
    stacked: int = 1
    """As in `Row`."""

    @property
    def numel(self) -> int:
        """Elements of the full weight."""
        return math.prod(self.shape)

    @property
    def matrices(self) -> int:
        """Matrices whose scores are compared with each other only: consecutive runs of numel / matrices elements."""
        return max(self.experts, 1) * self.stacked

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape of one of the matrices."""
        return (self.shape[-2] // self.stacked, self.shape[-1])

    @property
    def place(self) -> tuple[str, int]:
        """Module that holds the routed experts of the layer, and the number of the first that is in this weight."""
        assert self.experts, f"{self.name} belongs to no expert"
        if len(self.shape) == 3:
            return self.module, 0
        parts = self.module.split(".")
        last = max(index for index, part in enumerate(parts) if part.isdecimal())
        return ".".join(parts[:last]), int(parts[last])


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, wherever it lives: ZeRO-3 keeps it in `ds_shape` while the tensor is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def prunable_weights(model: nn.Module, config: SparseForgeConfig) -> list[PrunableWeight]:
    """The weights of `model` that go under a mask, in `named_parameters` order.

    Args:
        model: a transformers model (or anything with `config.model_type` and the family's parameter names); its
            parameters may be partitioned by ZeRO-3.
        config: its `pattern`, `include`, `exclude` and `allow_dense` are used.

    Raises:
        ValueError: as `prunable_names`, or a layer whose orientation is not the one in the table.
    """
    model_type, shapes = model_type_of(model), _shapes(model)
    found = _sort_out(_rule(model, config.include), shapes)
    weights = _chosen(model_type, found, shapes, config, choosable=_choosable(model))
    for weight in weights:
        _check_orientation(weight, model.get_submodule(weight.module))
    return weights


def prunable_names(
    model_type: str,
    shapes: dict[str, tuple[int, ...]],
    config: SparseForgeConfig,
    fused_name: Mapping[str, str] | None = None,
) -> list[PrunableWeight]:
    """`prunable_weights` for tools that have names and shapes but no model.

    Args:
        model_type: key of `FAMILIES`.
        shapes: full shape of every parameter by name; the order of the result is the order here.
        config: its `pattern`, `include`, `exclude` and `allow_dense` are used.
        fused_name: the name that these globs mean where it is another one: that of the fused weight, for an expert in a
            file.

    Raises:
        ValueError: unknown family; too much that the family does not name (`model.uncovered`); a glob that matches
            nothing; a shape that the pattern does not fit; nothing left to prune.
    """
    return _chosen(model_type, _sort_out(by_table(_family(model_type)), shapes), shapes, config, fused_name or {})


def uncovered_weights(model: nn.Module, config: SparseForgeConfig) -> Uncovered:
    """What neither the table nor the user has decided about. `prunable_weights` raises where it is too much."""
    prunable, unnamed = _sort_out(_rule(model, config.include), _shapes(model))
    return _uncovered(model_type_of(model), prunable, unnamed, config, {}, _choosable(model))


def coverage(model: nn.Module, weights: Iterable[PrunableWeight]) -> Coverage:
    """Count how much of `model` the masked `weights` are; full sizes under ZeRO-3."""
    numel = {weight.name: weight.numel for weight in weights}
    shapes, aside = _shapes(model), _embeddings_and_head(model)
    dense: dict[str, int] = {}
    for name, shape in shapes.items():
        bias = name.endswith("bias")  # of all experts of a layer, and so in two dimensions
        if len(shape) > 1 and name not in numel and name not in aside and not bias and not name.endswith(LOW_RANK):
            dense[name_pattern(name)] = dense.get(name_pattern(name), 0) + math.prod(shape)
    masked = sum(numel.values())
    return Coverage(
        masked=masked,
        linear=masked + sum(dense.values()),
        total=sum(math.prod(shape) for shape in shapes.values()),
        weights=len(numel),
        dense=dict(sorted(dense.items(), key=lambda item: -item[1])),
    )


def _family(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has no row in the family table; known families: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: full_shape(parameter) for name, parameter in model.named_parameters()}


def _embeddings_and_head(model: Any) -> set[str]:
    """Names of their parameters."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    aside = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in aside}


def _rule(model: nn.Module, include: tuple[str, ...]) -> Rule:
    model_type = model_type_of(model)
    return by_table(FAMILIES[model_type]) if model_type in FAMILIES else by_modules(model, include)


def _choosable(model: nn.Module) -> dict[str, int] | None:
    """The weights that `include` decides about, with the axis that each contracts; None for all."""
    return None if model_type_of(model) in FAMILIES else linear_layers(model)


def _sort_out(
    rule: Rule, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, PrunableWeight], dict[str, tuple[int, ...]]]:
    """All prunable weights by name, before include and exclude; and the matrices of which nothing is known."""
    prunable, unnamed = {}, {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        row = rule(name)
        if isinstance(row, Row):
            experts = shape[0] if len(shape) == 3 else int(row.experts)
            module = name.rpartition(".")[0]
            prunable[name] = PrunableWeight(name, tuple(shape), row.input_axis, module, experts, row.stacked)
        elif not row:
            unnamed[name] = tuple(shape)
    return prunable, unnamed


def _chosen(
    model_type: str,
    found: tuple[dict[str, PrunableWeight], dict[str, tuple[int, ...]]],
    shapes: dict[str, tuple[int, ...]],
    config: SparseForgeConfig,
    fused_name: Mapping[str, str] | None = None,
    choosable: Mapping[str, int] | None = None,
) -> list[PrunableWeight]:
    prunable, unnamed = found
    known = fused_name or {}
    check_chosen(config, shapes, prunable, unnamed, known, choosable)
    _uncovered(model_type, prunable, unnamed, config, known, choosable).check()
    chosen = [
        weight
        for name, weight in prunable.items()
        if (not config.include or matches(known.get(name, name), config.include))
        and not matches(known.get(name, name), config.exclude)
    ]
    if not chosen:
        cure = "widen include or narrow exclude"
        if not prunable and model_type not in FAMILIES:
            example = name_pattern(next(iter(unnamed), "model.layers.0.mlp.up_proj.weight"))
            cure = f'in a family without rows include names what is pruned, like "include": ["{example}"]'
        raise ValueError(
            f"no weight of this {model_type} model is left to prune ({len(prunable)} prunable weights, "
            f"include = {list(config.include)}, exclude = {list(config.exclude)}); {cure}"
        )
    pattern = config.parsed_pattern
    misfits = {w.name: why for w in chosen if (why := pattern.misfit(w.matrix, w.input_axis)) is not None}
    if misfits:
        name, why = next(iter(misfits.items()))
        raise ValueError(
            f"{_listed(misfits)} of shape {shapes[name]} cannot be {pattern}: {why}; choose another pattern, or keep "
            f'such weights dense with "exclude": ["{name}"] in the sparseforge block (globs are allowed)'
        )
    return chosen


def _uncovered(
    model_type: str,
    prunable: dict[str, PrunableWeight],
    unnamed: dict[str, tuple[int, ...]],
    config: SparseForgeConfig,
    fused_name: Mapping[str, str],
    choosable: Mapping[str, int] | None,
) -> Uncovered:
    names = {name: fused_name.get(name, name) for name in unnamed}
    needed, unneeded = [], []
    for glob in config.allow_dense:
        if matches_any(names.values(), glob):
            needed.append(glob)
        else:
            masked = matches_any([fused_name.get(name, name) for name in prunable], glob)
            cure = ", and what it does match goes under a mask (exclude would keep that dense)" if masked else ""
            unneeded.append(f"{glob}: not needed, it matches no weight that is undecided{cure}")
    decided = (*config.exclude, *config.allow_dense)

    def left_out(name: str) -> bool:
        chosen_from = bool(config.include) and (choosable is None or name in choosable)
        return chosen_from and not matches(names[name], config.include)

    return Uncovered(
        model_type=model_type,
        shapes={
            name: shape for name, shape in unnamed.items() if not matches(names[name], decided) and not left_out(name)
        },
        linear=sum(weight.numel for weight in prunable.values()) + sum(map(math.prod, unnamed.values())),
        layers=None
        if choosable is None
        else [
            name
            for name, shape in unnamed.items()
            if name in choosable and config.parsed_pattern.misfit(shape, choosable[name]) is None
        ],
        include=config.include,
        allow_dense=tuple(needed),
        unneeded=tuple(unneeded),
    )


def _check_orientation(weight: PrunableWeight, module: nn.Module) -> None:
    """nn.Linear holds (out, in); experts say themselves whether they are transposed; Conv1D is neither."""
    if isinstance(module, nn.Linear):
        actual = -1
    else:
        actual = -2 if len(weight.shape) == 2 or getattr(module, "is_transposed", False) else -1
    if actual != weight.input_axis:
        raise ValueError(
            f"{weight.name}: the family table has its input axis at {weight.input_axis}, but {type(module).__name__} "
            f'has it at {actual}; keep it dense with "exclude": ["{weight.name}"], or correct the table'
        )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
