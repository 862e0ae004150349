"""A model whose family the table does not have, pruned by what its layers say of themselves: asked for by one flag."""

from __future__ import annotations

import dataclasses
import json

from torch import nn

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import uncovered_weights
from sparseforge_ds.model.family_table import FAMILIES
from sparseforge_ds.model.rules import model_type_of


def any_family(model: nn.Module, config: SparseForgeConfig) -> SparseForgeConfig:
    """`config` with globs that decide about every matrix of a model of a family that the table does not have.

    Linear layers of numbered blocks and fused experts are pruned, along the axes that they contract; routers, what the
    pattern does not fit, and what does not say how it is stored stay dense; embeddings and the head do in any case.
    Where `config.include` chooses already, it stays, and everything else is kept dense. A family with rows is left to
    them.

    Args:
        model: on any device, also without weights.
        config: its `pattern`, `include`, `exclude` and `allow_dense` are used.
    """
    if model_type_of(model) in FAMILIES:
        return config
    pruned, dense = uncovered_weights(model, config).proposal()
    return dataclasses.replace(config, include=(*config.include, *pruned)).allowing_dense(dense)


def pasteable(config: SparseForgeConfig) -> str:
    """The keys of the `sparseforge` block that say the same without the flag, one line each."""
    keys = {"include": config.include, "allow_dense": config.allow_dense}
    return ",\n".join(f'"{key}": {json.dumps(globs)}' for key, globs in keys.items() if globs)
