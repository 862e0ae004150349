"""Whether the importance that is asked for can be measured in a model: known from its layers, before any weight is."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import PrunableWeight


def refuse_unmeasurable(model: nn.Module, weights: Iterable[PrunableWeight], config: SparseForgeConfig) -> None:
    """Refuse probes at the outputs of layers where a weight has no layer that every token passes.

    Args:
        model: may have no weights.
        weights: of it, under a mask.
        config: its `importance` and `curvature.per_token` are used.

    Raises:
        ValueError: there is such a weight.
    """
    if config.importance != "hutchinson" or not config.curvature.per_token:
        return
    linear = (nn.Linear, Conv1D)
    without = [w.name for w in weights if w.experts or not isinstance(model.get_submodule(w.module), linear)]
    if without:
        raise ValueError(
            f'importance "hutchinson" displaces outputs of layers that every token passes, and {without[0]} '
            f"({len(without)} in all) has no such layer; "
            'use "curvature": {"per_token": false}, which displaces weights, or importance "fisher"'
        )
