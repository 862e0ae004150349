"""Wanda's activation norms, used as a curvature.

Legend of shape suffixes: T tokens, S rows sorted by expert, E experts, H matrices stacked in an expert, O outputs,
I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.curvature.context import EstimatorContext, SumsEstimator
from sparseforge_ds.zero.expert_hooks import expert_tokens
from sparseforge_ds.zero.extra_passes import ProbeBatches
from sparseforge_ds.zero.layer_hooks import layer_inputs


class InputNorms(SumsEstimator):
    """Wanda's activation norms as a curvature: H_oi = mean x_i^2, so that H W^2 is Wanda's score squared.

    The score that is compared is (H + eps) W^2, eq. 3: eps raises inputs that are far below the mean of a matrix. With
    `curvature.damping` 0 the order is Wanda's own, but for scores that eq. 4 rounds to the same fp32 number, which are
    those that lie very far below the mean.

    All rows of H are equal: it is the product of its row and column sums.
    """

    def __init__(self, context: EstimatorContext, config: SparseForgeConfig) -> None:
        self.context = context
        self._sums = context.empty_sums
        self._tokens: dict[str, int] = {}
        """Tokens that passed the layer of each weight, experts in one weight aside."""

    @override
    def refresh(self, batches: ProbeBatches, step: int, probes: int) -> bool:
        """Collect the sums in a forward pass for every pass of a batch."""
        context = self.context
        self._sums = context.empty_sums.zeros()
        self._tokens = dict.fromkeys(context.shards, 0)
        context.expert_load.begin()
        with (
            layer_inputs(context.modules, self._add),
            expert_tokens(context.fused, self._add_experts, gradients=False),
        ):
            for batch in range(probes):
                for closure in batches.passes(batch):
                    context.extra_passes.loss(closure)
        return context.extra_passes.usable(self._sums.values)

    @torch.no_grad()
    @override
    def finish(self) -> tuple[AxisSums, Tensor]:
        """Return the sums and how many tokens they count; 0 also for a layer without a token on any rank."""
        return self._sums, self.context.agree_on_counts(self._tokens)

    def _add(self, name: str, input_TI: Tensor) -> None:
        """Add the sums of a linear layer's tokens."""
        context = self.context
        self._tokens[name] += input_TI.shape[0]
        if name in context.listed:
            context.expert_load.add(context.expert_load.rows[name], input_TI.shape[0])
        sum_O, sum_I = context.sums_of(name, self._sums)
        square_I = input_TI.float().square().sum(dim=0).double()
        sum_O += square_I.sum()
        sum_I += sum_O.numel() * square_I

    def _add_experts(
        self, layer: str, parameter: str, _g: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
    ) -> None:
        """Add the sums of a layer's fused experts."""
        context = self.context
        context.count(layer, parameter, stop_E)
        name = f"{layer}.{parameter}"
        if name not in context.shards:
            return
        # Add up each expert's tokens.
        row_S = torch.arange(len(input_SI), device=stop_E.device, dtype=stop_E.dtype)
        expert_S = torch.searchsorted(stop_E, row_S, right=True)
        square_EI = torch.zeros(len(stop_E), input_SI.shape[1], device=input_SI.device)
        square_EI.index_add_(0, expert_S, input_SI.float().square())
        # Its matrices have these inputs alike, and lie end to end, each with its row sums before its column sums.
        shape = context.shards[name].shape
        stacked = len(context.matrices.rows[name]) // len(stop_E)
        outputs = shape[-1 if name in context.input_first else -2] // stacked
        sum_EHO = square_EI.sum(dim=1, dtype=torch.float64)[:, None, None].expand(-1, stacked, outputs)
        sum_EHI = outputs * square_EI.double()[:, None].expand(-1, stacked, -1)
        in_order = (sum_EHI, sum_EHO) if name in context.input_first else (sum_EHO, sum_EHI)
        self._sums.weight_sums(name).add_(torch.cat(in_order, dim=2).view(-1))
