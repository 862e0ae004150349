"""Linear layers that can get a companion beside their weight: SLoRB's branch, or CAST's factors.

Such a layer stays the same object, with its parameters, hooks and names, and changes its class.
"""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import PrunableWeight, prunable_weights
from sparseforge_ds.model.shared_weights import refuse_shared


def plain_layers(
    model: nn.Module, config: SparseForgeConfig, attribute: str, companion: str, cure: str
) -> dict[PrunableWeight, nn.Linear | Conv1D]:
    """Return the layer of every prunable weight, after checking that each can get a companion.

    Args:
        model: of transformers.
        config: decides which weights are prunable.
        attribute: name under which a layer keeps its companion.
        companion: for messages, such as "low-rank branch".
        cure: setting of the block that does without, for messages.

    Raises:
        ValueError: a layer has the attribute already, is no plain `nn.Linear` or `Conv1D`, or shares its weight.
    """
    layers = {weight: model.get_submodule(weight.module) for weight in prunable_weights(model, config)}
    refuse_shared(model, layers, f"have its {companion}", cure)
    for weight, layer in layers.items():
        if hasattr(layer, attribute):
            raise ValueError(f"{weight.module} has its {attribute} already; call prepare once per model")
        # A subclass, or a forward of the layer's own, computes something else, which would be lost.
        if type(layer) not in (nn.Linear, Conv1D) or "forward" in vars(layer):
            raise ValueError(
                f"{weight.name} belongs to a {type(layer).__name__}, which has no {companion}"
                f"{' beside a forward of its own' if 'forward' in vars(layer) else ''}; set {cure}, or keep it dense "
                f'with "exclude": ["{weight.name}"] in the sparseforge block'
            )
    return layers  # type: ignore[return-value]  # the types were checked
