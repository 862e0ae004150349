"""Row and column sums of the per-token Fisher information, without forming a weight-shaped matrix.

With g (T, out) the gradient of a layer's output and x (T, in) its input, the Fisher per token of W_oi is the mean over
tokens of g_to^2 x_ti^2, and a score by row and column sums (`mask.factored`) needs two vectors of it:

    row sums   sum_t g_to^2 |x_t|^2        column sums   sum_t x_ti^2 |g_t|^2

They cost O(T (in + out)), so hooks can measure them in training's own passes, in all micro-batches of a step. This
takes no extra pass, and averages over all tokens of a step. The result depends on the sequences of the step, and not on
how they were divided. One reduction serves all layers. Experts have sums of their own, over the tokens that they saw.

Legend of shape suffixes: T tokens, S rows sorted by expert, E experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.curvature.context import EstimatorContext, SumsEstimator
from sparseforge_ds.mask.kernels.fisher import InputSquares, add_fisher_sums, expert_fisher_sums
from sparseforge_ds.zero.expert_hooks import expert_tokens
from sparseforge_ds.zero.extra_passes import ProbeBatches, divisor_of
from sparseforge_ds.zero.layer_hooks import block_entries, token_gradients


class FisherSums(SumsEstimator):
    """Collects the sums of the passes that it listens to: training's own, or those of a refresh."""

    def __init__(self, context: EstimatorContext, config: SparseForgeConfig) -> None:
        """Find the layers; `model.measurable` has checked that every weight has one."""
        self.context = context
        self._layer = {name: layer for layer, names in context.lists.items() for name in names}
        model = context.layout.engine.module
        self._blocks = {layer: model.get_submodule(layer.rpartition(".")[0]) for layer in context.lists}
        self._entered: dict[str, int] = {}
        """Tokens of the newest forward of the block around a list of experts, by the list's name."""
        self._sums: AxisSums | None = None
        self._tokens: dict[str, float] = {}
        self._squares = InputSquares()
        self.divisor: float | None = None
        """Divisor of the sum over tokens in a loss; None where it is the number of tokens of a micro-batch."""
        self.counted: float | None = None
        """Tokens that a micro-batch counts for, where that is not the divisor."""

    def begin(self) -> None:
        """Forget what was measured, and begin with losses that are means over a micro-batch's tokens."""
        self._sums = self.context.empty_sums.zeros()
        self._squares = InputSquares()
        self.divisor = None
        self.counted = None
        self._tokens = dict.fromkeys(self.context.shards, 0)
        self.context.expert_load.begin()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Measure in every backward pass through the layers while active. Does not communicate."""
        with (
            token_gradients(self.context.modules, self._add),
            expert_tokens(self.context.fused, self._add_experts),
            block_entries(self._blocks, self._entered.__setitem__),
        ):
            yield

    @override
    def refresh(self, batches: ProbeBatches, step: int, probes: int) -> bool:
        """Collect the sums in a forward and backward pass for every pass of a batch."""
        self.begin()
        with self.listening():
            for batch in range(probes):
                passes = batches.passes(batch)
                self.divisor = divisor_of(batches, batch)
                self.context.extra_passes.activations(passes)
        assert self._sums is not None
        return self.context.extra_passes.usable(self._sums.values)

    @torch.no_grad()
    @override
    def finish(self) -> tuple[AxisSums, Tensor]:
        """Return the sums and how many tokens they count; 0 also for a layer without a token on any rank."""
        sums = self._sums
        assert sums is not None
        self._sums = None
        return sums, self.context.agree_on_counts(self._tokens)

    def _add(self, name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
        """Add the sums of a linear layer's tokens."""
        context = self.context
        batch_tokens = tokens = grad_TO.shape[0]
        if name in context.expert_load.rows:  # an expert in a list sees only a part of its block's tokens
            batch_tokens = self._entered[self._layer[name]]
            if name in context.listed:
                context.expert_load.add(context.expert_load.rows[name], tokens)
        factor = self._factor(name, batch_tokens)
        assert self._sums is not None
        add_fisher_sums(grad_TO, input_TI, factor, *context.sums_of(name, self._sums), squares=self._squares)

    def _factor(self, name: str, tokens: int) -> float:
        """Count the tokens of a micro-batch, and return the factor of squared gradients of them.

        The loss is a sum over tokens divided by `divisor`. A token's own gradient is `divisor` times the measured one.
        """
        divisor = tokens if self.divisor is None else self.divisor
        self._tokens[name] += divisor if self.counted is None else self.counted
        return (divisor / self.context.extra_passes.backward_scale) ** 2

    def _add_experts(
        self, layer: str, parameter: str, grad_SO: Tensor | None, input_SI: Tensor, stop_E: Tensor, tokens: int
    ) -> None:
        """Add the sums of a layer's fused experts."""
        context = self.context
        context.count(layer, parameter, stop_E)
        name = f"{layer}.{parameter}"
        if name not in context.shards:
            return
        assert grad_SO is not None and self._sums is not None
        experts = len(context.expert_load.rows[name])
        stacked = len(context.matrices.rows[name]) // experts
        factor = self._factor(name, tokens)
        row_EHO, column_EHI = expert_fisher_sums(grad_SO, input_SI, stop_E, stacked)
        # The matrices of a weight lie end to end, each with its row sums before its column sums.
        in_order = (column_EHI, row_EHO) if name in context.input_first else (row_EHO, column_EHI)
        self._sums.weight_sums(name).add_(torch.cat(in_order, dim=2).view(-1), alpha=factor)
