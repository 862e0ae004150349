"""CAST's weight scaling: one learned factor per output of a pruned layer (arXiv 2509.25996).

    y = s * (x w^T) + b

The pull of the decay makes weights smaller; s makes up for it without a say in which weights are the largest of a
group, since a group lies in one output. When the mask freezes, s is folded into the weights and the layer is plain.
The layers reuse the `Parameter` objects of the layers that they replace. How finely CAST scales is not published.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import PrunableWeight, full_shape, prunable_weights
from sparseforge_ds.model.family_table import SCALE
from sparseforge_ds.model.layer_swap import refuse_hooks, replace_layer


class ScaledLinear(nn.Linear):
    """`nn.Linear` whose outputs have a factor each; the weight stays (out, in)."""

    weight_scale: nn.Parameter

    def __init__(self, linear: nn.Linear) -> None:
        """Take over the parameters of `linear`."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = full_shape(linear.weight)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.weight_scale = _ones(self.out_features, like=linear.weight)
        self.enabled = True
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not self.enabled:
            return super().forward(input)
        return _scaled(F.linear(input, self.weight), self.weight_scale, self.bias)


class ScaledConv1D(Conv1D):  # type: ignore[misc]  # transformers is untyped
    """GPT-2's `Conv1D` whose outputs have a factor each; the weight stays (in, out)."""

    weight_scale: nn.Parameter

    def __init__(self, conv: Conv1D) -> None:
        """Take over the parameters of `conv`."""
        nn.Module.__init__(self)
        self.nx, self.nf = full_shape(conv.weight)
        self.weight, self.bias = conv.weight, conv.bias
        self.weight_scale = _ones(self.nf, like=conv.weight)
        self.enabled = True
        self.train(conv.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not self.enabled:
            return super().forward(x)  # type: ignore[no-any-return]
        return _scaled(x @ self.weight, self.weight_scale, self.bias)


Scaled = ScaledLinear | ScaledConv1D


def add_scales(model: nn.Module, config: SparseForgeConfig) -> None:
    """Give every prunable layer its factors, in place, all 1.

    Raises:
        ValueError: a prunable weight belongs to no plain linear layer.
    """
    layers = {weight: model.get_submodule(weight.module) for weight in prunable_weights(model, config)}
    for weight, layer in layers.items():
        _check_layer(weight, layer)
    for weight, layer in layers.items():
        scaled = ScaledLinear(layer) if isinstance(layer, nn.Linear) else ScaledConv1D(layer)
        replace_layer(model, weight, scaled)


def scaled_layers(model: nn.Module) -> dict[str, Scaled]:
    """The layers with factors by the name of their weight; empty when the model has none."""
    found = ((name, module) for name, module in model.named_modules())
    return {f"{name}.weight": module for name, module in found if isinstance(module, (ScaledLinear, ScaledConv1D))}


def _ones(outputs: int, like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.ones(outputs, dtype=like.dtype, device=like.device))


def _scaled(product: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return product * scale if bias is None else torch.addcmul(bias, product, scale)


def _check_layer(weight: PrunableWeight, layer: nn.Module) -> None:
    if isinstance(layer, (ScaledLinear, ScaledConv1D)):
        raise ValueError(f"{weight.module} has its {SCALE} already; call prepare once per model")
    if type(layer) not in (nn.Linear, Conv1D):
        raise ValueError(
            f"{weight.name} belongs to a {type(layer).__name__}, which has no weight scaling; set "
            f'"method": {{"name": "cast", "scaling": false}}, or keep it dense with "exclude": ["{weight.name}"]'
        )
    refuse_hooks(weight, layer)
