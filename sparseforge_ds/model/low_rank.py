"""SLoRB, a learned low-rank companion of each pruned layer (design eq. 13; arXiv 2409.09099 introduced it).

    y = x (w^T + P^T B^T)

P is a fixed sum over runs of `k` neighbouring inputs: no parameters and no matmul, a reshape and a sum. B, of shape
(out, in / k), is learned. It is zero and switched off until the forge starts it (`compensate`): before the first step
from a shift of the weights, or as published from what a mask removes (`methods.compensate`).

The layers here reuse the weight and bias `Parameter` objects of the layers they replace: parameter names, ZeRO-3
partitions and masks do not notice. Shape suffixes: O outputs, I inputs, K runs of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.experts import expert_lists, join_gradients, leaf_modules
from sparseforge_ds.model.families import (
    LOW_RANK,
    PrunableWeight,
    full_shape,
    prunable_weights,
)
from sparseforge_ds.model.layer_swap import refuse_hooks, replace_layer
from sparseforge_ds.model.weight_scale import add_scales
from sparseforge_ds.zero.leaves import gather_as_one


class LowRankLinear(nn.Linear):
    """`nn.Linear` with a switchable branch; the weight stays (out, in)."""

    low_rank_b: nn.Parameter

    def __init__(self, linear: nn.Linear, k: int) -> None:
        """Take over the parameters of `linear`; `k` must divide its inputs."""
        nn.Module.__init__(self)
        outputs, inputs = full_shape(linear.weight)
        self.in_features, self.out_features = inputs, outputs
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.low_rank_b = _zeros(outputs, inputs // k, like=linear.weight)
        self.k = k
        self.enabled = False
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        output = super().forward(input)
        return _add_branch(output, input, self.low_rank_b, self.k) if self.enabled else output

    def extra_repr(self) -> str:
        """Sizes for print(model)."""
        return f"{super().extra_repr()}, k={self.k}, enabled={self.enabled}"


class LowRankConv1D(Conv1D):  # type: ignore[misc]  # transformers is untyped
    """GPT-2's `Conv1D` with a switchable branch; the weight stays (in, out), B is (out, in / k) as everywhere."""

    low_rank_b: nn.Parameter

    def __init__(self, conv: Conv1D, k: int) -> None:
        """Take over the parameters of `conv`; `k` must divide its inputs."""
        nn.Module.__init__(self)
        inputs, outputs = full_shape(conv.weight)
        self.nx, self.nf = inputs, outputs
        self.weight, self.bias = conv.weight, conv.bias
        self.low_rank_b = _zeros(outputs, inputs // k, like=conv.weight)
        self.k = k
        self.enabled = False
        self.train(conv.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        output = super().forward(x)
        return _add_branch(output, x, self.low_rank_b, self.k) if self.enabled else output

    def __repr__(self) -> str:
        return f"LowRankConv1D(nf={self.nf}, nx={self.nx}, k={self.k}, enabled={self.enabled})"


Branch = LowRankLinear | LowRankConv1D


def prepare(model: nn.Module, config: SparseForgeConfig) -> nn.Module:
    """Make a model ready, in place; call it once, before `deepspeed.initialize`.

    The routed experts of a layer become a ZeRO-3 leaf (`leaf_modules`), and those in lists get gradients together
    (`join_gradients`). Without `low_rank` nothing else happens.
    Otherwise every layer whose weight goes under a mask becomes a
    `LowRankLinear` or `LowRankConv1D` with `enabled = False`, and computes what it did before, bit for bit.

    Args:
        model: a transformers model; its parameters may be partitioned by ZeRO-3 already. The new ones are ordinary
            parameters with the dtype and device of their weight, which `deepspeed.initialize` partitions.
        config: its `low_rank` and all that decides what is prunable.

    Returns:
        The same object.

    Raises:
        ValueError: `k` does not divide an input axis; fused experts; a layer with forward or backward hooks; a model
            that was prepared before; whatever `prunable_weights` raises.
    """
    gather_as_one(model, leaf_modules(model))
    join_gradients(model, expert_lists(model))
    if config.method.name == "cast" and config.method.scaling:
        add_scales(model, config)
    if config.low_rank is None:
        return model
    k = config.low_rank.k
    layers = {weight: model.get_submodule(weight.module) for weight in prunable_weights(model, config)}
    for weight, layer in layers.items():
        _check_layer(weight, layer, k)
    for weight, layer in layers.items():
        branch = LowRankLinear(layer, k) if isinstance(layer, nn.Linear) else LowRankConv1D(layer, k)
        replace_layer(model, weight, branch)
    return model


def branches(model: nn.Module) -> dict[str, Branch]:
    """The branched layers by the name of their weight, in module order; empty when the model has none."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, (LowRankLinear, LowRankConv1D))
    }


def low_rank_share(model: nn.Module, weights: Iterable[PrunableWeight]) -> tuple[float, float]:
    """What the branches cost, as two fractions (0.0, 0.0 without branches).

    Returns:
        Parameter share: elements of all B over the elements of all other parameters of the model.
        FLOP share: FLOPs per token of the branches (block sums and the matmul with B) over the dense FLOPs of the
        `weights`' own matmuls. Kernels that skip half of those FLOPs double the share.
    """
    added = branches(model)
    of_branches = sum(math.prod(full_shape(branch.low_rank_b)) for branch in added.values())
    of_model = sum(math.prod(full_shape(parameter)) for parameter in model.parameters()) - of_branches
    dense_flops, branch_flops = 0, 0
    for weight in weights:
        dense_flops += 2 * weight.numel
        if weight.name in added:
            outputs, runs = full_shape(added[weight.name].low_rank_b)
            branch_flops += 2 * outputs * runs + weight.shape[weight.input_axis]
    return of_branches / of_model, branch_flops / dense_flops


def _zeros(*shape: int, like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))


def _add_branch(output: Tensor, x: Tensor, b_OK: Tensor, k: int) -> Tensor:
    """output + B (P x). `sum` accumulates 16-bit inputs in fp32 and rounds once."""
    return output + F.linear(x.reshape(*x.shape[:-1], x.shape[-1] // k, k).sum(-1), b_OK)


def _check_layer(weight: PrunableWeight, layer: nn.Module, k: int) -> None:
    if isinstance(layer, (LowRankLinear, LowRankConv1D)):
        raise ValueError(f"{weight.module} has its {LOW_RANK} already; call prepare once per model")
    if type(layer) not in (nn.Linear, Conv1D):  # a subclass computes something else, which replacing it would lose
        raise ValueError(
            f"{weight.name} belongs to a {type(layer).__name__}, which has no low-rank branch; set "
            f'"low_rank": null, or keep it dense with "exclude": ["{weight.name}"] in the sparseforge block'
        )
    if weight.experts:
        raise ValueError(
            f"{weight.name} belongs to a routed expert, which low_rank does not cover; set "
            '"low_rank": null, or keep experts dense with "exclude": ["*.experts.*"] in the sparseforge block'
        )
    inputs = weight.shape[weight.input_axis]
    if inputs % k:
        raise ValueError(
            f"low_rank.k = {k} does not divide the {inputs} inputs of {weight.name}; choose a divisor of {inputs}, or "
            f'keep it dense with "exclude": ["{weight.name}"] in the sparseforge block'
        )
    refuse_hooks(weight, layer)
