"""Whether the importance that is asked for can be measured in a model: known from its layers, before any weight is."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import PrunableWeight


def refuse_unmeasurable(model: nn.Module, weights: Iterable[PrunableWeight], config: SparseForgeConfig) -> None:
    """Refuse weights without a layer where the importance is measured at layers. The model may have no weights."""
    linear = (nn.Linear, Conv1D)
    if not config.keeps_sums:
        squared = config.importance in ("fisher", "gauss_newton") and config.curvature.per_token
        listed = [w.name for w in weights if w.experts and isinstance(model.get_submodule(w.module), linear)]
        if squared and listed:
            raise ValueError(
                f"{listed[0]} ({len(listed)} in all) is of an expert in a list of modules, which a rank calls only if "
                "it has tokens for it, so that elements per token cannot be summed over ranks there; use "
                '"curvature": {"factored": null}, or "per_token": false'
            )
        return
    displaces = config.importance == "hutchinson"
    bare = [
        weight.name
        for weight in weights
        if (displaces if weight.experts else not isinstance(model.get_submodule(weight.module), linear))
    ]
    if bare and displaces:
        raise ValueError(
            f'importance "hutchinson" displaces outputs of layers that every token passes, and {bare[0]} '
            f"({len(bare)} in all) has no such layer; "
            'use "curvature": {"per_token": false}, which displaces weights, or importance "fisher"'
        )
    if bare:
        raise ValueError(
            f"{bare[0]} ({len(bare)} in all) belongs to no linear layer, so that the tokens that reach it cannot "
            'be seen; use "curvature": {"factored": false}, which squares gradients of whole batches there'
        )
