"""The linear layers of a packed 2:4 model: their weights stay packed in memory, on CPUs and GPUs."""

from __future__ import annotations

from torch import Tensor, nn

from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.mask.packing import unpack24


class Packed24Linear(nn.Linear):
    """`nn.Linear` whose `weight` holds the kept values, (out, in/2), and `weight_positions` where they belong.

    0.5625 of the bytes of a bf16 weight, in memory and in its state dict, whose names are those of a packed24 file. An
    adapter may sit on it and be trained; `weight` itself has no gradient.

    Args:
        weight: (out, in/2), the kept values of `pack24`.
        positions: (out, ceil(in/8)), uint8; checked for damage by whoever read them.
        bias: (out,), or None.
    """

    weight_positions: Tensor
    dense_class: type[nn.Linear] = nn.Linear
    """Of the ordinary layer: Falcon has one that forms the same sum in its own words."""

    def __init__(self, weight: Tensor, positions: Tensor, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape[0], 2 * weight.shape[1]
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_positions", positions)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        result: Tensor = linear24(input, self.weight, self.weight_positions, self.bias)
        return result

    def dense(self) -> nn.Module:
        """The ordinary layer with the same weight; its bias is shared."""
        layer = self.dense_class(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(unpack24(self.weight.detach(), self.weight_positions))
        layer.register_parameter("bias", self.bias)
        return layer.train(self.training)
