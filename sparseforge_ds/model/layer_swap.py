"""A layer of a model in the place of another one, for what a weight needs beside it (SLoRB, CAST's factors)."""

from __future__ import annotations

from torch import nn

from sparseforge_ds.model.families import PrunableWeight


def refuse_hooks(weight: PrunableWeight, layer: nn.Module) -> None:
    """Refuse a layer from which something would be lost.

    Raises:
        ValueError: it has hooks.
    """
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise ValueError(
            f"{weight.module} has hooks, which would be lost when its layer is replaced; "
            "call prepare before anything registers hooks on the model"
        )


def replace_layer(model: nn.Module, weight: PrunableWeight, layer: nn.Module) -> None:
    """Put `layer` where the layer of `weight` is."""
    parent, _, attribute = weight.module.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)
