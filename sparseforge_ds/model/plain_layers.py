"""The linear layers that can be given something beside their weight (SLoRB's branch, CAST's factors).

Such a layer stays the object that it is, with its parameters, hooks and names, and changes its class.
"""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import PrunableWeight, prunable_weights
from sparseforge_ds.model.shared_weights import refuse_shared


def plain_layers(
    model: nn.Module, config: SparseForgeConfig, attribute: str, words: str, cure: str
) -> dict[PrunableWeight, nn.Linear | Conv1D]:
    """The layer of every prunable weight. Raises ValueError where a layer has the attribute already, is not plain, or
    shares its weight. `words` name what the layers are to get, and `cure` is what to set in the block to do without."""
    layers = {weight: model.get_submodule(weight.module) for weight in prunable_weights(model, config)}
    refuse_shared(model, layers, f"have its {words}", cure)
    for weight, layer in layers.items():
        if hasattr(layer, attribute):
            raise ValueError(f"{weight.module} has its {attribute} already; call prepare once per model")
        # A subclass, or a forward of the layer's own, computes something else, which would be lost.
        if type(layer) not in (nn.Linear, Conv1D) or "forward" in vars(layer):
            raise ValueError(
                f"{weight.name} belongs to a {type(layer).__name__}, which has no {words}"
                f"{' beside a forward of its own' if 'forward' in vars(layer) else ''}; set {cure}, or keep it dense "
                f'with "exclude": ["{weight.name}"] in the sparseforge block'
            )
    return layers  # type: ignore[return-value]  # by the types above
