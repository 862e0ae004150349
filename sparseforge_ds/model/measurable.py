"""Check that a model's layers allow the chosen importance to be measured, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import PrunableWeight


def refuse_unmeasurable(model: nn.Module, weights: Iterable[PrunableWeight], config: SparseForgeConfig) -> None:
    """Reject weights whose curvature cannot be measured at their layers.

    Args:
        model: with or without weights.
        weights: those under a mask.
        config: its `importance` and `curvature` are used.

    Raises:
        ValueError: a weight of no linear layer, or of an expert that the estimator cannot measure.
    """
    linear = (nn.Linear, Conv1D)
    # Squares of each token's elements are summed over ranks, which must all have called the layer.
    if not config.keeps_sums:
        listed = [w.name for w in weights if w.experts and isinstance(model.get_submodule(w.module), linear)]
        if config.importance == "fisher" and listed:
            raise ValueError(
                f"{listed[0]} ({len(listed)} in all) belongs to an expert that some ranks never call, so its "
                'curvature cannot be summed over ranks by elements; use "curvature": {"factored": null}'
            )
        return
    # Hutchinson displaces outputs of layers that every token passes, which routed experts have not.
    displaces = config.importance == "hutchinson"
    unmeasurable = [
        weight.name
        for weight in weights
        if (displaces if weight.experts else not isinstance(model.get_submodule(weight.module), linear))
    ]
    if not unmeasurable:
        return
    if displaces:
        raise ValueError(
            f'importance "hutchinson" displaces outputs of layers that every token passes, and {unmeasurable[0]} '
            f"({len(unmeasurable)} in all) has no such layer; "
            'use "curvature": {"per_token": false}, which displaces weights, or importance "fisher"'
        )
    importance = 'importance "fisher" with ' if config.importance == "wanda" else ""
    raise ValueError(
        f"{unmeasurable[0]} ({len(unmeasurable)} in all) belongs to no linear layer, so the tokens that reach it are "
        f'not seen; use {importance}"curvature": {{"factored": false}}, which squares gradients of whole batches there'
    )
