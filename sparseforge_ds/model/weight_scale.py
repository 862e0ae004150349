"""CAST's weight scaling: one learned factor per output of a pruned layer (arXiv 2509.25996).

    y = s * (x w^T) + b

The decay of pruned weights makes a layer's outputs smaller, and s makes up for it. It does not change which weights are
the largest of a group, since a group of n:m lies in one output; tiles are refused. When the mask freezes, s is folded
into the weights and the layer is plain. CAST's granularity of scaling is not published.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.family_table import SCALE
from sparseforge_ds.model.plain_layers import plain_layers


class Scaled(nn.Module):
    """A linear layer with one factor for each output. Its weight keeps its orientation."""

    weight: Any
    bias: Any
    weight_scale: nn.Parameter
    """Factors s, (out,)."""
    enabled: bool
    """False once the factors are folded into the weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute s * (x w^T) + b, (..., in) -> (..., out)."""
        if not self.enabled:
            output: Tensor = super().forward(input)
            return output
        product = F.linear(input, self.weight) if isinstance(self, nn.Linear) else input @ self.weight
        if self.bias is None:
            return product * self.weight_scale
        return torch.addcmul(self.bias, product, self.weight_scale)


class ScaledLinear(Scaled, nn.Linear):
    """`nn.Linear` with factors."""


class ScaledConv1D(Scaled, Conv1D):  # type: ignore[misc]  # transformers is untyped
    """GPT-2's `Conv1D` with factors."""


def add_scales(model: nn.Module, config: SparseForgeConfig) -> None:
    """Add factors, which are all 1, to every prunable layer, in place.

    Raises:
        ValueError: a prunable weight belongs to no plain linear layer.
    """
    layers = plain_layers(model, config, SCALE, "weight scaling", '"method": {"name": "cast", "scaling": false}')
    for weight, layer in layers.items():
        layer.__class__ = ScaledLinear if isinstance(layer, nn.Linear) else ScaledConv1D
        outputs = weight.numel // weight.shape[weight.input_axis]
        layer.weight_scale = nn.Parameter(layer.weight.new_ones(outputs))
        layer.enabled = True


def scaled_layers(model: nn.Module) -> dict[str, Scaled]:
    """Return the layers with factors by the name of their weight; empty if the model has none."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Scaled)}
