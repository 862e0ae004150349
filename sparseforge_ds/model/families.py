"""What is prunable in a model, by the table of families.

A matrix that no row names is never skipped in silence: `model.uncovered` refuses a model with more than a little of
that. In a family that the table does not have, linear layers and fused experts are pruned where `include` names them,
along the axis that their class contracts. Names and full shapes are enough here, so offline tools use the same table.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.mask.packing import is_packed
from sparseforge_ds.model.coverage import Coverage
from sparseforge_ds.model.family_table import BRANCH as BRANCH
from sparseforge_ds.model.family_table import FAMILIES, Row
from sparseforge_ds.model.family_table import LOW_RANK as LOW_RANK
from sparseforge_ds.model.family_table import PROJECTION as PROJECTION
from sparseforge_ds.model.rules import (
    Rule,
    check_globs,
    contracting,
    embeddings_and_head,
    layer_rule,
    matches,
    model_type_of,
    name_pattern,
    table_rule,
)
from sparseforge_ds.model.uncovered import Uncovered


@dataclass(frozen=True)
class PrunableWeight(SparseWeight):
    """One weight under a mask, and where it is in its model."""

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
    def first_expert(self) -> tuple[str, int]:
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
        ValueError: as `prunable_names`, a layer whose orientation is not the one in the table, or a packed one.
    """
    for name, module in model.named_modules():
        if is_packed(module):
            raise ValueError(f"{name} is packed 2:4, which cannot be trained; call model.dequantize() first")
    weights = _matrices_of(model, config).chosen(config)
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
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has no row in the family table; known families: {', '.join(FAMILIES)}"
        )
    return _Matrices(model_type, shapes, table_rule(FAMILIES[model_type]), fused_name=fused_name).chosen(config)


def uncovered_weights(model: nn.Module, config: SparseForgeConfig) -> Uncovered:
    """What neither the table nor the user has decided about. `prunable_weights` raises where it is too much."""
    return _matrices_of(model, config).uncovered(config)


def coverage(model: nn.Module, weights: Iterable[PrunableWeight]) -> Coverage:
    """Count how much of `model` the masked `weights` are; full sizes under ZeRO-3."""
    numel = {weight.name: weight.numel for weight in weights}
    shapes, aside = _shapes(model), embeddings_and_head(model)
    dense: dict[str, int] = {}
    for name, shape in shapes.items():
        bias = name.endswith("bias")  # of all experts of a layer, and so in two dimensions
        if len(shape) > 1 and name not in numel and name not in aside and not bias and not name.endswith(BRANCH):
            dense[name_pattern(name)] = dense.get(name_pattern(name), 0) + math.prod(shape)
    masked = sum(numel.values())
    return Coverage(
        masked=masked,
        linear=masked + sum(dense.values()),
        total=sum(math.prod(shape) for shape in shapes.values()),
        weights=len(numel),
        dense=dict(sorted(dense.items(), key=lambda item: -item[1])),
    )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: full_shape(parameter) for name, parameter in model.named_parameters()}


def _matrices_of(model: nn.Module, config: SparseForgeConfig) -> _Matrices:
    model_type = model_type_of(model)
    if model_type in FAMILIES:
        return _Matrices(model_type, _shapes(model), table_rule(FAMILIES[model_type]))
    axes = {name: row.input_axis for name, row in contracting(model).items()}
    return _Matrices(model_type, _shapes(model), layer_rule(model, config.include), axes)


class _Matrices:
    """The matrices of a model, by what is known of them."""

    def __init__(
        self,
        model_type: str,
        shapes: Mapping[str, tuple[int, ...]],
        rule: Rule,
        linear: Mapping[str, int] | None = None,
        fused_name: Mapping[str, str] | None = None,
    ) -> None:
        """Sort them out.

        Args:
            linear: in a family without rows, the weights that `include` decides about, and the axis of each.
            fused_name: the name that a user's globs mean where it is another one.
        """
        self.model_type = model_type
        self.shapes = shapes
        self.linear = linear
        self.known = {name: (fused_name or {}).get(name, name) for name in shapes}
        """The names that a user's globs are matched with."""
        self.prunable: dict[str, PrunableWeight] = {}
        """Before include and exclude."""
        self.unnamed: dict[str, tuple[int, ...]] = {}
        """Those of which nothing is known."""
        for name, shape in shapes.items():
            row = rule(name) if len(shape) > 1 else True
            if isinstance(row, Row):
                experts = shape[0] if len(shape) == 3 else int(row.experts)
                module = name.rpartition(".")[0]
                self.prunable[name] = PrunableWeight(name, tuple(shape), row.input_axis, module, experts, row.stacked)
            elif not row:
                self.unnamed[name] = tuple(shape)

    def chosen(self, config: SparseForgeConfig) -> list[PrunableWeight]:
        """The weights that go under a mask; see `prunable_names` for what it raises."""
        self._check_globs(config)
        self.uncovered(config).check()
        chosen = [
            weight
            for name, weight in self.prunable.items()
            if (not config.include or matches(self.known[name], config.include))
            and not matches(self.known[name], config.exclude)
        ]
        if not chosen:
            cure = "widen include or narrow exclude"
            if not self.prunable and self.linear is not None:
                example = name_pattern(next(iter(self.unnamed), "model.layers.0.mlp.up_proj.weight"))
                cure = f'in a family without rows include names what is pruned, like "include": ["{example}"]'
            raise ValueError(
                f"no weight of this {self.model_type} model is left to prune ({len(self.prunable)} prunable weights, "
                f"include = {list(config.include)}, exclude = {list(config.exclude)}); {cure}"
            )
        pattern = config.parsed_pattern
        misfits = {w.name: why for w in chosen if (why := pattern.misfit(w.matrix, w.input_axis)) is not None}
        if misfits:
            name, why = next(iter(misfits.items()))
            more = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
            raise ValueError(
                f"{name}{more} of shape {self.shapes[name]} cannot be {pattern}: {why}; choose another pattern, or "
                f'keep such weights dense with "exclude": ["{name}"] in the sparseforge block (globs are allowed)'
            )
        return chosen

    def uncovered(self, config: SparseForgeConfig) -> Uncovered:
        """What nobody has decided about."""
        unnamed, prunable = ([self.known[name] for name in some] for some in (self.unnamed, self.prunable))
        unneeded = {}
        for glob in config.allow_dense:
            if not fnmatch.filter(unnamed, glob):
                masked = fnmatch.filter(prunable, glob)
                cure = ", and what it does match goes under a mask (exclude would keep that dense)" if masked else ""
                unneeded[glob] = f"{glob}: not needed, it matches no weight that is undecided{cure}"

        def is_decided(name: str) -> bool:
            known, chosen_from = self.known[name], bool(config.include) and (self.linear is None or name in self.linear)
            left_out = chosen_from and not matches(known, config.include)
            return left_out or matches(known, (*config.exclude, *config.allow_dense))

        linear, misfit = self.linear or {}, config.parsed_pattern.misfit
        fitting = [name for name, shape in self.unnamed.items() if name in linear and not misfit(shape, linear[name])]
        return Uncovered(
            model_type=self.model_type,
            shapes={name: shape for name, shape in self.unnamed.items() if not is_decided(name)},
            linear=sum(weight.numel for weight in self.prunable.values()) + sum(map(math.prod, self.unnamed.values())),
            layers=None if self.linear is None else fitting,
            include=config.include,
            allow_dense=tuple(glob for glob in config.allow_dense if glob not in unneeded),
            unneeded=tuple(unneeded.values()),
        )

    def _check_globs(self, config: SparseForgeConfig) -> None:
        def why(name: str) -> str:
            real = next(real for real, known in self.known.items() if known == name)
            if len(self.shapes[real]) < 2:
                return "which is a vector: only matrices are pruned"
            if real not in self.unnamed:
                return "which stays dense, as embeddings, heads and routers do"
            if self.linear is None:
                return "which no row of the family table names"
            return "whose layer does not say which axis it contracts"

        included = [self.known[name] for name in self.prunable] if self.linear is None else list(self.linear)
        matrices = [self.known[name] for name, shape in self.shapes.items() if len(shape) > 1]
        check_globs("include", config.include, included, self.known.values(), why)
        check_globs("exclude", config.exclude, matrices, self.known.values(), why)


def _check_orientation(weight: PrunableWeight, module: nn.Module) -> None:
    """nn.Linear holds (out, in); experts say whether they are transposed, but for Llama 4's; Conv1D is neither."""
    if len(weight.shape) == 3 and not hasattr(module, "is_transposed"):
        return
    as_it_is = len(weight.shape) == 3 and not module.is_transposed
    actual = -1 if isinstance(module, nn.Linear) or as_it_is else -2
    if actual != weight.input_axis:
        raise ValueError(
            f"{weight.name}: the family table has its input axis at {weight.input_axis}, but {type(module).__name__} "
            f'has it at {actual}; keep it dense with "exclude": ["{weight.name}"], or correct the table'
        )
