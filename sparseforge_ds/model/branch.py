"""The layer of a low-rank branch (SLoRB, design eq. 13), in training and in models loaded from a packed folder.

    y = x (w^T + P^T B^T)

P is a fixed sum over runs of `k` neighbouring inputs, the last of which is shorter where `k` does not divide them: no
parameters and no matmul, a reshape and a sum. B, of shape (out, ceil(in / k)), is learned. The layers are those of the
model with another class: parameter names, ZeRO-3 partitions and masks do not notice.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D


class Branch(nn.Module):
    """What a layer with a switchable branch has beside its weight, which keeps its orientation."""

    low_rank_b: nn.Parameter
    """(out, ceil(in / k))."""
    k: int
    enabled: bool

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out): x w^T + (P x) B^T. `sum` accumulates 16-bit inputs in fp32 and rounds once."""
        output: Tensor = super().forward(input)
        if not self.enabled:
            return output
        return output + F.linear(sums_of_runs(input, self.k), self.low_rank_b)

    def extra_repr(self) -> str:
        """Sizes for print(model)."""
        return f"{super().extra_repr()}, k={self.k}, enabled={self.enabled}"


class LowRankLinear(Branch, nn.Linear):
    """`nn.Linear` with a branch."""


class LowRankConv1D(Branch, Conv1D):  # type: ignore[misc]  # transformers is untyped
    """GPT-2's `Conv1D` with a branch."""


def sums_of_runs(input: Tensor, k: int) -> Tensor:
    """P x: (..., in) -> (..., ceil(in / k)), sums of k neighbours."""
    if rest := -input.shape[-1] % k:
        input = F.pad(input, (0, rest))
    return input.reshape(*input.shape[:-1], input.shape[-1] // k, k).sum(-1)


def add_branch(layer: nn.Linear | Conv1D, k: int, b_OK: nn.Parameter | None = None) -> Branch:
    """Give a layer a branch that is off, in place. A layer that is neither `nn.Linear` nor `Conv1D` keeps its own
    forward too. B is given of a layer that this one takes the place of; else it is 0."""
    outputs, inputs = (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    if b_OK is None:
        b_OK = nn.Parameter(layer.weight.new_zeros(outputs, math.ceil(inputs / k)))
    kind = type(layer)
    own = {nn.Linear: LowRankLinear, Conv1D: LowRankConv1D}.get(kind)
    layer.__class__ = own or type(f"LowRank{kind.__name__}", (Branch, kind), {})
    assert isinstance(layer, Branch)
    layer.low_rank_b = b_OK
    layer.k, layer.enabled = k, False
    return layer


def branches(model: nn.Module) -> dict[str, Branch]:
    """The branched layers by the name of their weight, in module order; empty when the model has none."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Branch)}
