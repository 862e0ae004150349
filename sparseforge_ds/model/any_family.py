"""Globs for a model whose family has no rows in the table, proposed from the classes of its layers (`--any_family`)."""

from __future__ import annotations

import dataclasses
import json

from torch import nn

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.coverage import Coverage, percent
from sparseforge_ds.model.families import uncovered_weights
from sparseforge_ds.model.family_table import FAMILIES
from sparseforge_ds.model.rules import model_type_of


def any_family(model: nn.Module, config: SparseForgeConfig) -> SparseForgeConfig:
    """Add globs to `config` such that every matrix of the model is either pruned or allowed to stay dense.

    Linear layers of numbered blocks and fused experts are pruned along the axes that they contract. Embeddings, the
    head, routers, matrices that the pattern does not fit, and those whose layer does not say how it is stored stay
    dense. If `config.include` is set, only what it names is pruned. A family with rows in the table is left to them.

    Args:
        model: on any device, with or without weights.
        config: its `pattern`, `include`, `exclude` and `allow_dense` are used.

    Returns:
        `config` with longer `include` and `allow_dense`; `config` itself if the family has rows.
    """
    if model_type_of(model) in FAMILIES:
        return config
    pruned, dense = uncovered_weights(model, config).proposal()
    return dataclasses.replace(config, include=(*config.include, *pruned)).allowing_dense(dense)


def few_pruned(coverage: Coverage) -> str | None:
    """Return a warning if less than half of a model's linear weights are pruned, or None."""
    if 2 * coverage.masked >= coverage.linear:
        return None
    return (
        f"only {percent(coverage.masked, coverage.linear)} of the linear weights will be pruned: --any_family leaves "
        "dense what the pattern does not divide, and layers that do not say how they are stored; for these add rows by "
        "sparseforge_ds.register_family"
    )


def pasteable(config: SparseForgeConfig) -> str:
    """Return `include` and `allow_dense` as lines of JSON to paste into the `sparseforge` block."""
    keys = {"include": config.include, "allow_dense": config.allow_dense}
    return ",\n".join(f'"{key}": {json.dumps(globs)}' for key, globs in keys.items() if globs)
