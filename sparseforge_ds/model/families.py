"""Selection of the weights of a model that go under a mask, by the table of families.

A matrix that no row names is never skipped in silence: `model.uncovered` refuses a model with more than a few of
them. In a family without rows, `include` chooses among linear layers and fused experts, which are pruned along the axis
that their class contracts. Names and full shapes are enough, so offline tools use the same functions.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.mask.quantization import scale_group
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
from sparseforge_ds.packed_format.packing import has_packed_weights


@dataclass(frozen=True)
class PrunableWeight(SparseWeight):
    """One weight under a mask, and its place in the model."""

    module: str
    """Name of the module that holds the parameter, as in `model.get_submodule`."""
    experts: int = 0
    """Routed experts in this weight: 0 if every token sees it, 1 for an expert in a list, else the first axis."""
    stacked: int = 1
    """Matrices that lie end to end along the output axis of one expert, as in `Row`."""

    @property
    def numel(self) -> int:
        """Number of elements of the full weight."""
        return math.prod(self.shape)

    @property
    def matrices(self) -> int:
        """Number of matrices in this weight, each a run of numel / matrices elements.

        Scores are compared inside a matrix only.
        """
        return max(self.experts, 1) * self.stacked

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape of one matrix."""
        return (self.shape[-2] // self.stacked, self.shape[-1])

    @property
    def first_expert(self) -> tuple[str, int]:
        """Name of the module that holds the layer's routed experts, and the number of this weight's first expert."""
        assert self.experts, f"{self.name} belongs to no expert"
        if len(self.shape) == 3:
            return self.module, 0
        # An expert in a list has its number as the last one in its name.
        parts = self.module.split(".")
        last = max(index for index, part in enumerate(parts) if part.isdecimal())
        return ".".join(parts[:last]), int(parts[last])


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter: ZeRO-3 keeps it in `ds_shape` while the tensor is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class PatternMisfitError(ValueError):
    """A weight that the pattern does not fit.

    Args:
        fault: which weight, and why.
        cure: what a sparseforge block can do about it.
    """

    def __init__(self, fault: str, cure: str) -> None:
        super().__init__(f"{fault}; {cure}")
        self.fault = fault


def prunable_weights(model: nn.Module, config: SparseForgeConfig) -> list[PrunableWeight]:
    """Return the weights of `model` that go under a mask, in `named_parameters` order.

    Args:
        model: a transformers model (or anything with `config.model_type` and the family's parameter names); its
            parameters may be partitioned by ZeRO-3.
        config: its `pattern`, `include`, `exclude` and `allow_dense` are used.

    Raises:
        ValueError: as `prunable_names`, or a layer is packed, or is not stored in the orientation of the table.
    """
    for name, module in model.named_modules():
        if has_packed_weights(module):
            raise ValueError(f"{name} is packed 2:4, which cannot be trained; call model.dequantize() first")
    weights = _matrices_of(model, config).select(config)
    for weight in weights:
        _check_orientation(weight, model.get_submodule(weight.module))
    return weights


def check_prunable(model: nn.Module, config: SparseForgeConfig) -> None:
    """Check that the weights of `model` that go under a mask can be told.

    Raises:
        ValueError: the errors of `prunable_weights`.
    """
    prunable_weights(model, config)


def prunable_names(
    model_type: str,
    shapes: dict[str, tuple[int, ...]],
    config: SparseForgeConfig,
    fused_name: Mapping[str, str] | None = None,
) -> list[PrunableWeight]:
    """Return what `prunable_weights` does, for tools that have names and shapes but no model.

    Args:
        model_type: key of `FAMILIES`.
        shapes: full shape of every parameter by name; the order of the result is the order here.
        config: its `pattern`, `include`, `exclude` and `allow_dense` are used.
        fused_name: name that globs are matched with, where it differs: that of the fused weight for one expert's part.

    Raises:
        ValueError: unknown family; too much that the family does not name (`model.uncovered`); a glob that matches
            nothing; a shape that the pattern does not fit; nothing left to prune.
    """
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has no row in the family table; known families: {', '.join(FAMILIES)}"
        )
    return _Matrices(model_type, shapes, table_rule(FAMILIES[model_type]), fused_name=fused_name).select(config)


def uncovered_weights(model: nn.Module, config: SparseForgeConfig) -> Uncovered:
    """Return the weights about which neither the table nor the user has decided.

    `prunable_weights` raises if they are more than `uncovered.TOLERANCE`.
    """
    return _matrices_of(model, config).uncovered(config)


def coverage(model: nn.Module, weights: Iterable[PrunableWeight]) -> Coverage:
    """Count the elements of `model` and of its masked `weights`; full sizes under ZeRO-3."""
    numel = {weight.name: weight.numel for weight in weights}
    shapes = _shapes(model)
    not_linear = embeddings_and_head(model)
    dense: dict[str, int] = {}
    for name, shape in shapes.items():
        is_bias = name.endswith("bias")  # those of all experts of a layer have two dimensions
        is_linear = len(shape) > 1 and name not in not_linear and not is_bias and not name.endswith(BRANCH)
        if is_linear and name not in numel:
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
    """Sort the matrices of a model by its family's rows, or by its layers if it has none."""
    model_type = model_type_of(model)
    if model_type in FAMILIES:
        return _Matrices(model_type, _shapes(model), table_rule(FAMILIES[model_type]))
    axes = {name: row.input_axis for name, row in contracting(model).items()}
    return _Matrices(model_type, _shapes(model), layer_rule(model, config.include), axes)


class _Matrices:
    """Matrices of a model, sorted into prunable ones, dense ones, and those that nothing is known of."""

    def __init__(
        self,
        model_type: str,
        shapes: Mapping[str, tuple[int, ...]],
        rule: Rule,
        linear: Mapping[str, int] | None = None,
        fused_name: Mapping[str, str] | None = None,
    ) -> None:
        """Sort the matrices.

        Args:
            model_type: of the model.
            shapes: full shape of every parameter by name.
            rule: says for a name whether it is prunable or known to stay dense.
            linear: in a family without rows, the weights that `include` chooses from, and the axis of each.
            fused_name: name that globs are matched with, where it differs.
        """
        self.model_type = model_type
        self.shapes = shapes
        self.linear = linear
        self.glob_name = {name: (fused_name or {}).get(name, name) for name in shapes}
        """Name that a user's globs are matched with, by the parameter's own name."""
        self.prunable: dict[str, PrunableWeight] = {}
        """Weights that could go under a mask, before include and exclude."""
        self.unnamed: dict[str, tuple[int, ...]] = {}
        """Shapes of the matrices that nothing is known of."""
        for name, shape in shapes.items():
            # Vectors stay dense without a rule.
            row = rule(name) if len(shape) > 1 else True
            if isinstance(row, Row):
                experts = shape[0] if len(shape) == 3 else int(row.experts)
                module = name.rpartition(".")[0]
                self.prunable[name] = PrunableWeight(name, tuple(shape), row.input_axis, module, experts, row.stacked)
            elif not row:
                self.unnamed[name] = tuple(shape)

    def select(self, config: SparseForgeConfig) -> list[PrunableWeight]:
        """Return the weights that go under a mask, with the errors of `prunable_names`."""
        # Nobody's mistake may leave a weight dense in silence.
        self._check_globs(config)
        self.uncovered(config).check()
        chosen = [
            weight
            for name, weight in self.prunable.items()
            if (not config.include or matches(self.glob_name[name], config.include))
            and not matches(self.glob_name[name], config.exclude)
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
        # The pattern must fit every chosen weight.
        pattern = config.parsed_pattern
        misfits = {w.name: cause for w in chosen if (cause := pattern.misfit(w.matrix, w.input_axis)) is not None}
        if misfits:
            name, cause = next(iter(misfits.items()))
            more = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
            globs = json.dumps(list(dict.fromkeys(map(name_pattern, misfits)))[:4])
            raise PatternMisfitError(
                f"{name}{more} of shape {self.shapes[name]} cannot be {pattern}: {cause}",
                f'choose another pattern, or keep such weights dense with "exclude": {globs} in the sparseforge block, '
                "or --exclude (globs)",
            )
        # So must the groups that share a scale.
        if config.quantize is not None:
            for weight in chosen:
                try:
                    scale_group(pattern, config.quantize.group_size, weight.shape[weight.input_axis])
                except ValueError as error:
                    raise ValueError(
                        f"{weight.name}: quantize.group_size = {config.quantize.group_size}: {error}"
                    ) from None
        return chosen

    def uncovered(self, config: SparseForgeConfig) -> Uncovered:
        """Return the weights about which neither the rule nor the user's globs have decided."""
        # A glob of allow_dense that names nothing undecided is said to be superfluous.
        unnamed = [self.glob_name[name] for name in self.unnamed]
        prunable = [self.glob_name[name] for name in self.prunable]
        unneeded = {}
        for glob in config.allow_dense:
            if not fnmatch.filter(unnamed, glob):
                masked = fnmatch.filter(prunable, glob)
                cure = ", and what it does match goes under a mask (exclude would keep that dense)" if masked else ""
                unneeded[glob] = f"{glob}: not needed, it matches no weight that is undecided{cure}"

        def is_decided(name: str) -> bool:
            include_decides = bool(config.include) and (self.linear is None or name in self.linear)
            left_out = include_decides and not matches(self.glob_name[name], config.include)
            return left_out or matches(self.glob_name[name], (*config.exclude, *config.allow_dense))

        # In a family without rows, include could prune those that the pattern fits.
        linear = self.linear or {}
        misfit = config.parsed_pattern.misfit
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
        """Reject globs of include and exclude that match nothing they could decide about."""

        def explain(glob_name: str) -> str:
            """Say why a parameter cannot be chosen."""
            name = next(name for name, matched in self.glob_name.items() if matched == glob_name)
            if len(self.shapes[name]) < 2:
                return "which is a vector: only matrices are pruned"
            if name not in self.unnamed:
                return "which stays dense, as embeddings, heads and routers do"
            if self.linear is None:
                return "which no row of the family table names"
            return "whose layer does not say which axis it contracts"

        included = [self.glob_name[name] for name in self.prunable] if self.linear is None else list(self.linear)
        matrices = [self.glob_name[name] for name, shape in self.shapes.items() if len(shape) > 1]
        check_globs("include", config.include, included, self.glob_name.values(), explain)
        check_globs("exclude", config.exclude, matrices, self.glob_name.values(), explain)


def _check_orientation(weight: PrunableWeight, module: nn.Module) -> None:
    """Raise ValueError if a layer contracts another axis than the table says."""
    # nn.Linear holds (out, in), Conv1D (in, out); experts say so in is_transposed, except for Llama 4's.
    if len(weight.shape) == 3 and not hasattr(module, "is_transposed"):
        return
    is_out_in = isinstance(module, nn.Linear) or (len(weight.shape) == 3 and not module.is_transposed)
    actual = -1 if is_out_in else -2
    if actual != weight.input_axis:
        raise ValueError(
            f"{weight.name}: the family table has its input axis at {weight.input_axis}, but {type(module).__name__} "
            f'has it at {actual}; keep it dense with "exclude": ["{weight.name}"], or correct the table'
        )
