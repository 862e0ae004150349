"""Statistics of Wanda, in the place of a curvature."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.context import Diagonal, Estimator, EstimatorContext
from sparseforge_ds.zero.expert_hooks import expert_tokens
from sparseforge_ds.zero.layer_hooks import layer_inputs
from sparseforge_ds.zero.probe import ProbeBatches


class InputNorms(Estimator):
    """Wanda's activation norms as a curvature: H_oi = mean x_i^2, so that H W^2 is Wanda's score squared."""

    def __init__(self, context: EstimatorContext, config: SparseForgeConfig) -> None:
        self.context = context
        if missing := sorted(set(context.shards) - set(context.modules) - set(context.expert_load.rows)):
            raise ValueError(
                f'importance "wanda" needs a linear layer for every prunable weight, which {missing[0]} '
                f'({len(missing)} in all) has not; use "fisher"'
            )

    @override
    def refresh(
        self, batches: ProbeBatches, step: int, probes: int, total: Diagonal, write_masters: Callable[[], None]
    ) -> bool:
        """Measure in a forward pass for every pass of a batch; one reduction serves all layers."""
        context = self.context
        layout = context.layout
        # (experts, in + 1): of each expert, or of all tokens, the sum of squares and the number of tokens.
        sums: dict[str, Tensor] = {}
        for name, shard in context.shards.items():  # not every layer is called on every rank
            size = (
                len(context.expert_load.rows.get(name, (0,))),
                shard.shape[-2 if name in context.input_first else -1] + 1,
            )
            sums[name] = torch.zeros(size, device=layout.device)

        def on_inputs(name: str, input_TI: Tensor) -> None:
            sums[name] += F.pad(input_TI.float().square().sum(dim=0), (0, 1), value=input_TI.shape[0])

        def on_experts(
            layer: str, parameter: str, _g: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
        ) -> None:
            name = f"{layer}.{parameter}"
            if name in context.shards:
                square_SI = F.pad(input_SI.float().square(), (0, 1), value=1.0)
                row_S = torch.arange(len(square_SI), device=stop_E.device, dtype=stop_E.dtype)
                sums[name].index_add_(0, torch.searchsorted(stop_E, row_S, right=True), square_SI)

        with (
            layer_inputs(context.modules, on_inputs),
            expert_tokens(context.fused, on_experts, gradients=False) if context.fused else nullcontext(),
        ):
            for probe in range(probes):
                for closure in batches.passes(probe):
                    context.probe.loss(closure)
        # Sum over the ranks, and tell every one of them of a layer that none has called.
        vector = torch.cat([sums[name].view(-1) for name in context.shards])
        layout.all_reduce(vector)
        reduced = {
            name: part.view_as(sums[name])
            for name, part in zip(
                context.shards, vector.split([sums[name].numel() for name in context.shards]), strict=True
            )
        }
        called = sorted(set(context.modules) - set(context.expert_load.rows))
        counts = torch.stack([reduced[name][0, -1] for name in called]).tolist() if called else []
        if unseen := [name for name, count in zip(called, counts, strict=True) if not count]:
            raise ValueError(f"{unseen[0]}: its layer was not called by the probe, so it has no activation norm")
        context.expert_load.take({name: reduced[name][:, -1] for name in context.expert_load.rows})
        # The mean square of its input is the H of every element of a column.
        for name, shard in context.shards.items():
            column_EI = reduced[name][:, :-1] / reduced[name][:, -1:].clamp(min=1)
            for chunk in context.chunks[name]:
                index = torch.arange(chunk.start, chunk.stop, device=vector.device)
                row = index // shard.shape[-1] % shard.shape[-2]
                column = index % shard.shape[-1]
                inputs = row if name in context.input_first else column
                expert = index // (shard.shape[-2] * shard.shape[-1]) if len(column_EI) > 1 else 0
                total[name][chunk.start - shard.start : chunk.stop - shard.start] = column_EI[expert, inputs]
        return True
