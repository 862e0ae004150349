"""Linear layers of a packed 2:4 model, whose weights stay packed in memory, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.packed_format.packed_values import GRIDS, SCALE, dense_inputs
from sparseforge_ds.packed_format.packing import unpack24


class Packed24Linear(nn.Linear):
    """`nn.Linear` whose `weight` holds the kept values, (out, in/2), and `weight_positions` their positions.

    It takes 0.5625 of the bytes of a bf16 weight, with 8-bit values 0.3125, with int4 0.195 at groups of 64, in memory
    and in its state dict, whose names are those of a packed24 file. An adapter on it may be trained; `weight` itself
    has no gradient.

    Args:
        weight: (out, in/2), the kept values of `pack24`, or rounded ones of `round_values`, of int4 (out, in/4).
        positions: (out, ceil(in/8)), uint8; checked for damage by whoever read them.
        bias: (out,), or None.
        scale: scales of rounded values; None for others.
    """

    weight_positions: Tensor
    weight_scale: Tensor | None
    dense_class: type[nn.Linear] = nn.Linear
    """Class of the dense layer; Falcon has its own."""

    def __init__(
        self, weight: Tensor, positions: Tensor, bias: nn.Parameter | None = None, scale: Tensor | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.out_features = weight.shape[0]
        self.in_features = dense_inputs(weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_positions", positions)
        self.register_buffer("weight_scale", scale)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply (..., in) by the weight, and return (..., out)."""
        result: Tensor = linear24(input, self.weight, self.weight_positions, self.bias, self.weight_scale)
        return result

    def dense(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the ordinary layer with the same weight, of rounded values in `dtype`; its bias is shared."""
        layer = self.dense_class(self.in_features, self.out_features, bias=False, device="meta")
        weight = unpack24(self.weight.detach(), self.weight_positions, self.weight_scale, dtype)
        layer.weight = nn.Parameter(weight)
        layer.register_parameter("bias", self.bias)
        return layer.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move as any module does, and keep rounded values and their scales when other tensors are cast."""
        return super()._apply(keep_bits(self, fn), recurse)


def keep_bits(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that applies `fn`, but only moves rounded values, scales and positions, whatever `fn` casts.

    Args:
        module: a module with packed weights.
        fn: function of `nn.Module._apply`, which moves a tensor, casts one that is floating point, or casts any.
    """
    scales = {id(buffer) for name, buffer in module.named_buffers(recurse=False) if name.endswith(SCALE)}

    def apply(tensor: Tensor) -> Tensor:
        if id(tensor) not in scales and tensor.dtype not in GRIDS.values():
            return fn(tensor)
        integers = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
        moved = fn(integers)
        # `Module.type` casts integers, too.
        return (moved if moved.dtype == integers.dtype else integers.to(moved.device)).view(tensor.dtype)

    return apply
