"""CAST: dense training whose decay wears the smaller weights of every group away (arXiv 2509.25996, section 3).

The network sees W itself until the mask freezes, so only weights that the decay has made small are cut off. AdamS
applies an L1 decay to masked weights only, scaled like Adam's own step and outside of its moments:
W <- W - lr lambda sign(W) / (sqrt(v / c2) + eps). Here W stops at 0 instead of crossing it. Weight scaling is in
`model.weight_scale`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.curvature.ranking import Ranking
from sparseforge_ds.methods.periodic_magnitude_mask import PeriodicMagnitudeMask
from sparseforge_ds.model.weight_scale import scaled_layers
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.extra_passes import Closure, ProbeBatches


class Cast(PeriodicMagnitudeMask):
    """CAST's AdamS, on top of the engine's own Adam."""

    chooses_at_freeze = True

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        weights.require_adam("cast")

    @override
    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """Fold the factors of outputs into W when the mask freezes; the decay has removed masked weights by then."""
        self.needs_republish = self.weights.schedule.is_projection(step)
        if self.needs_republish:
            self._fold()
        return super().update(step, probe)

    @override
    def resume(self) -> None:
        for layer in scaled_layers(self.weights.engine.module).values():
            layer.enabled = self.weights.step < self.weights.schedule.freeze_step

    @override
    def after_step(self, index: int, param_group: dict[str, Any]) -> None:
        state = self.weights.state.partition(index)
        if self.weights.step < self.weights.schedule.freeze_step and "exp_avg_sq" in state:
            # An Adam that counts its steps on the device needs no wait for the host.
            count = torch.as_tensor(self._steps(state, param_group)).double()
            correction = (1 - param_group["betas"][1] ** count).sqrt()
            dense = state["dense"].view(-1)
            second = state["exp_avg_sq"].view(-1)
            for run, pruned in self.pruned_runs(index):
                divisor = second[run].float().sqrt().div_(correction)
                pull = pruned.mul_(param_group["lr"] * self.decay).div_(divisor.add_(param_group["eps"]))
                dense[run] = dense[run].sign() * (dense[run].abs() - pull).clamp_(min=0)
        super().after_step(index, param_group)

    def _steps(self, state: dict[str, Any], param_group: dict[str, Any]) -> Tensor | int:
        """Return Adam's step count. DeepSpeed's Adam keeps an integer, with only one of a group's parameters."""
        count: Tensor | int = state.get("step", param_group.get("step", 0))
        if isinstance(count, Tensor):
            return count
        states = self.weights.layout.inner.state
        return max(count, *(states.get(flat, {}).get("step", 0) for flat in param_group["params"]))

    @torch.no_grad()
    def _fold(self) -> None:
        """Do W <- s W, s <- 1, one layer at a time: s is sharded unlike W, so every rank gathers all of it."""
        weights = self.weights
        for name, layer in scaled_layers(weights.engine.module).items():
            weight = weights.prunable[name]
            # Take the factors from all ranks, and leave ones.
            scale_name = f"{weight.module}.weight_scale"
            scale = weights.layout.gather_master(scale_name).view(-1)
            weights.layout.master(weights.layout.shards[scale_name]).fill_(1.0)
            inputs = weight.shape[weight.input_axis]
            for chunk in weights.chunks([name]):
                index = torch.arange(chunk.start, chunk.stop, device=scale.device)
                output = index // inputs if weight.input_axis == -1 else index % (weight.numel // inputs)
                dense = weights.dense(chunk)
                dense.mul_(scale[output].to(dense.device))
            layer.enabled = False
        self.ranking.curvature.extra_passes.forget_gradients()  # else the gradient of s would stay in the norm
