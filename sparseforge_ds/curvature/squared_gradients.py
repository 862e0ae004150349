"""Squared gradients: the diagonal of the Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.context import Diagonal, Estimator, EstimatorContext
from sparseforge_ds.mask.curvature import token_fisher
from sparseforge_ds.mask.kernels.fisher import expert_fisher
from sparseforge_ds.zero.expert_hooks import expert_tokens
from sparseforge_ds.zero.extra_passes import ProbeBatches, divisor_of, reduce_to_shard
from sparseforge_ds.zero.layer_hooks import token_gradients
from sparseforge_ds.zero.shard import Shard


class SquaredGradients(Estimator):
    """Fisher: squared gradients, per token where the weight belongs to a linear layer."""

    def __init__(self, context: EstimatorContext, config: SparseForgeConfig) -> None:
        self.context = context
        self.per_batch = set(context.shards) - set(context.modules) - set(context.expert_load.rows)
        """Weights of no linear layer, whose tokens are not seen."""

    @override
    def refresh(
        self, batches: ProbeBatches, step: int, probes: int, total: Diagonal, write_masters: Callable[[], None]
    ) -> bool:
        """Average the probes, each of a forward and backward pass for every pass of a batch."""
        context = self.context
        layout = context.layout

        def on_tokens(name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
            shard = context.shards[name]
            sum_OI = token_fisher(grad_TO, input_TI, context.extra_passes.backward_scale)
            flat = (sum_OI.t() if name in context.input_first else sum_OI).reshape(-1)
            _, part = reduce_to_shard(layout, shard, context.ranges[name], flat)
            # The loss is a sum over tokens divided by D, by default this pass's T. So sum (D g)^2 over tokens, divide
            # by D for the mean, and by the number of passes on all ranks.
            factor = (divisor or grad_TO.shape[0]) / (layout.world_size * probes * len(passes))
            total[name].add_(part.to(total[name].device), alpha=factor)

        def on_experts(
            layer: str, parameter: str, grad_SO: Tensor | None, input_SI: Tensor, stop_E: Tensor, tokens: int
        ) -> None:
            context.count(layer, parameter, stop_E)
            name = f"{layer}.{parameter}"
            if name not in context.shards:
                return
            assert grad_SO is not None
            shard = context.shards[name]
            size = grad_SO.shape[1] * input_SI.shape[1]
            # As above, but the mean is over an expert's N tokens, which are known after all ranks have counted.
            scale = context.extra_passes.backward_scale / (divisor or tokens)
            for first, sum_EOI in expert_fisher(grad_SO, input_SI, stop_E, scale):
                flat = (sum_EOI.transpose(1, 2) if name in context.input_first else sum_EOI).reshape(-1)
                inside, part = reduce_to_shard(layout, shard, context.ranges[name], flat, first * size)
                total[name][inside].add_(part.to(total[name].device))
                del sum_EOI, flat, part  # before the next experts' are formed

        def add_square(shard: Shard, gradient: Tensor) -> None:
            total[shard.name].addcmul_(gradient, gradient, value=1 / probes)

        # Listen to the layers in every pass; other weights take the gradient of the whole batch.
        context.expert_load.begin()
        for batch in range(probes):
            passes = batches.passes(batch)
            divisor = divisor_of(batches, batch)
            with token_gradients(context.modules, on_tokens), expert_tokens(context.fused, on_experts):
                if not self.per_batch:
                    context.extra_passes.activations(passes)
                elif not context.extra_passes.gradients(
                    passes, lambda index, gradient: context.add_gradient(index, gradient, self.per_batch, add_square)
                ):
                    return False
        if not context.extra_passes.usable(*total.values()):
            return False
        context.expert_load.agree()
        context.divide(total, context.expert_load.read()[0])
        return True
