"""The layer of a low-rank branch (SLoRB, design eq. 13), in training and in models loaded from a packed folder.

    y = x (w^T + P^T B^T)

P is a fixed sum over runs of `k` neighbouring inputs, the last of which is shorter where `k` does not divide them: no
parameters and no matmul, a reshape and a sum. B, of shape (out, ceil(in / k)), is learned. Or P is learned as B is, of
shape (rank, in), which makes the branch LoRA's with P for its A. The layers are those of the model with another class:
parameter names, ZeRO-3 partitions and masks do not notice.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.model.family_table import LOW_RANK, PROJECTION


class Branch(nn.Module):
    """What a layer with a switchable branch has beside its weight, which keeps its orientation."""

    low_rank_b: nn.Parameter
    """(out, rank), of which the rank is ceil(in / k) where P is fixed."""
    low_rank_p: nn.Parameter | None
    """(rank, in) where P is learned; None where it is fixed."""
    k: int
    """Weights of the layer for each number of the branch."""
    enabled: bool

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out): x w^T + (P x) B^T. `sum` accumulates 16-bit inputs in fp32 and rounds once."""
        output: Tensor = super().forward(input)
        if not self.enabled:
            return output
        if self.low_rank_p is None:
            return output + F.linear(sums_of_runs(input, self.k), self.low_rank_b)
        return output + F.linear(F.linear(input, self.low_rank_p), self.low_rank_b)

    def extra_repr(self) -> str:
        """Sizes for print(model)."""
        learned = self.low_rank_p is not None
        return f"{super().extra_repr()}, k={self.k}, learned={learned}, enabled={self.enabled}"


class LowRankLinear(Branch, nn.Linear):
    """`nn.Linear` with a branch."""


class LowRankConv1D(Branch, Conv1D):  # type: ignore[misc]  # transformers is untyped
    """GPT-2's `Conv1D` with a branch."""


def sums_of_runs(input: Tensor, k: int) -> Tensor:
    """P x: (..., in) -> (..., ceil(in / k)), sums of k neighbours."""
    if rest := -input.shape[-1] % k:
        input = F.pad(input, (0, rest))
    return input.reshape(*input.shape[:-1], input.shape[-1] // k, k).sum(-1)


def branch_rank(outputs: int, inputs: int, k: int, learned: bool) -> int:
    """Columns of B: a run of k inputs for each; or, with a learned P, as many as give B and P one number together for k
    weights, to the nearest whole rank, at least 1."""
    return max(1, round(outputs * inputs / (k * (outputs + inputs)))) if learned else math.ceil(inputs / k)


def add_branch(layer: nn.Linear | Conv1D, k: int, learned: bool = False, like: Branch | None = None) -> Branch:
    """Give a layer a branch that is off, in place. A layer that is neither `nn.Linear` nor `Conv1D` keeps its own
    forward too. B and a learned P are those of the layer that this one is `like`; else they are 0."""
    outputs, inputs = (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    rank = branch_rank(outputs, inputs, k, learned)
    kind, zeros = type(layer), layer.weight.new_zeros
    own = {nn.Linear: LowRankLinear, Conv1D: LowRankConv1D}.get(kind)
    layer.__class__ = own or type(f"LowRank{kind.__name__}", (Branch, kind), {})
    assert isinstance(layer, Branch)
    if like is None:
        b, p = nn.Parameter(zeros(outputs, rank)), nn.Parameter(zeros(rank, inputs)) if learned else None
    else:
        b, p = like.low_rank_b, like.low_rank_p
    layer.register_parameter(LOW_RANK, b)
    layer.register_parameter(PROJECTION, p)
    layer.k, layer.enabled = k, False
    return layer


def branches(model: nn.Module) -> dict[str, Branch]:
    """The branched layers by the name of their weight, in module order; empty when the model has none."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Branch)}
