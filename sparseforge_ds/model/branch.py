"""Layers with a low-rank branch (SLoRB, eq. 13), in training and in models loaded from a packed folder.

    y = x (w^T + P^T B^T)

B, of shape (out, rank), is learned. A fixed P sums runs of `k` neighbouring inputs, so the rank is ceil(in / k); it
costs no parameters and no matmul, but a reshape and a sum. A learned P, of shape (rank, in), makes the branch LoRA's
with P for its A. The layers are those of the model with another class, so parameter names, ZeRO-3 partitions and masks
stay the same.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.model.family_table import LOW_RANK, PROJECTION


class Branch(nn.Module):
    """A linear layer with a branch that can be switched off. Its weight keeps its orientation."""

    low_rank_b: nn.Parameter
    """B, (out, rank). The rank is ceil(in / k) if P is fixed."""
    low_rank_p: nn.Parameter | None
    """P, (rank, in), if it is learned; None if it is fixed."""
    k: int
    """Number of weights of the layer for each learned number of the branch."""
    enabled: bool

    def forward(self, input: Tensor) -> Tensor:
        """Compute x w^T + (P x) B^T, (..., in) -> (..., out)."""
        output: Tensor = super().forward(input)
        if not self.enabled:
            return output
        if self.low_rank_p is None:
            return output + F.linear(sums_of_runs(input, self.k), self.low_rank_b)
        return output + F.linear(F.linear(input, self.low_rank_p), self.low_rank_b)

    def extra_repr(self) -> str:
        """Describe the branch for print(model)."""
        learned = self.low_rank_p is not None
        return f"{super().extra_repr()}, k={self.k}, learned={learned}, enabled={self.enabled}"


class LowRankLinear(Branch, nn.Linear):
    """`nn.Linear` with a branch."""


class LowRankConv1D(Branch, Conv1D):  # type: ignore[misc]  # transformers is untyped
    """GPT-2's `Conv1D` with a branch."""


def sums_of_runs(input: Tensor, k: int) -> Tensor:
    """Compute P x for a fixed P: sums of k neighbours, (..., in) -> (..., ceil(in / k)).

    `sum` accumulates 16-bit inputs in fp32 and rounds once.
    """
    k = run_length(input.shape[-1], k)
    if rest := -input.shape[-1] % k:
        input = F.pad(input, (0, rest))
    return input.reshape(*input.shape[:-1], input.shape[-1] // k, k).sum(-1)


def run_length(inputs: int, k: int) -> int:
    """Return the inputs that share a column of B where P is fixed: k, or all if there are fewer."""
    return min(k, inputs)


def branch_rank(outputs: int, inputs: int, k: int, learned: bool) -> int:
    """Return the rank of a layer's branch, which is the number of columns of B.

    A fixed P gives one rank to each run of `k` inputs. With a learned P, B and P together have one number for `k`
    weights, rounded to the nearest rank of at least 1.
    """
    if learned:
        return max(1, round(outputs * inputs / (k * (outputs + inputs))))
    return math.ceil(inputs / run_length(inputs, k))


def add_branch(layer: nn.Linear | Conv1D, k: int, learned: bool = False, like: Branch | None = None) -> Branch:
    """Turn a layer, in place, into one with a branch that is switched off.

    Args:
        layer: a subclass of `nn.Linear` or `Conv1D` keeps its own forward, to which the branch is added.
        k: weights of the layer for each learned number of the branch.
        learned: True for a learned P.
        like: layer whose B and P this one shares; None for new ones, which are zero.

    Returns:
        The same layer.
    """
    outputs, inputs = (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    rank = branch_rank(outputs, inputs, k, learned)
    weight = layer.weight
    # A subclass gets a branched class of its own, made of both.
    kind = type(layer)
    branched_kind = {nn.Linear: LowRankLinear, Conv1D: LowRankConv1D}.get(kind)
    layer.__class__ = branched_kind or type(f"LowRank{kind.__name__}", (Branch, kind), {})
    assert isinstance(layer, Branch)
    if like is not None:
        layer.register_parameter(LOW_RANK, like.low_rank_b)
        layer.register_parameter(PROJECTION, like.low_rank_p)
    else:
        layer.register_parameter(LOW_RANK, nn.Parameter(weight.new_zeros(outputs, rank)))
        layer.register_parameter(PROJECTION, nn.Parameter(weight.new_zeros(rank, inputs)) if learned else None)
    layer.k = k
    layer.enabled = False
    return layer


def branches(model: nn.Module) -> dict[str, Branch]:
    """Return the branched layers by the name of their weight, in module order; empty if the model has none."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Branch)}
