"""AST: periodic magnitude masks, and an annealed decay without momentum (arXiv 2407.20584, section 3).

The decay rises with the steps. As in the authors' optimizer, it is added after the first moment and so enters only the
second: u = m + lambda (1 - mask) W, v = b2 v + (1 - b2) u^2, W <- W - lr / c1 * u / (sqrt(v / c2) + eps), with c1
and c2 the bias corrections of Adam.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.curvature.ranking import Ranking
from sparseforge_ds.methods.periodic_magnitude_mask import PeriodicMagnitudeMask
from sparseforge_ds.sharded_weights import ShardedWeights


class Ast(PeriodicMagnitudeMask):
    """Method that steps the prunable weights itself, on the states and settings of the engine's Adam."""

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        weights.require_adam("ast")
        inner = weights.layout.inner
        for group in inner.param_groups:
            is_decoupled = group.get("decoupled_weight_decay", getattr(inner, "adam_w_mode", False))
            if group["weight_decay"] and not is_decoupled:
                raise ValueError(
                    f'method "ast" decays weights as AdamW does, and {type(inner).__name__} adds weight_decay '
                    f'{group["weight_decay"]:g} to gradients; use "optimizer": {{"type": "AdamW"}} in the '
                    "DeepSpeed JSON"
                )

    @override
    def before_step(self, index: int, gradient: Tensor, param_group: dict[str, Any]) -> Tensor | None:
        """Step the weights in the place of the optimizer."""
        # Use the optimizer's own moments and step count; create them as its first step would.
        trained = self.weights.state.weights_being_trained(index)
        state = self.weights.state.partition(index)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(trained)
        count = int(state.get("step", 0)) + 1
        state["step"] = torch.tensor(float(count))
        beta1, beta2 = param_group["betas"]
        rate = param_group["lr"]
        dense, gradients, first, second = (
            tensor.view(-1) for tensor in (trained, gradient, state["exp_avg"], state["exp_avg_sq"])
        )
        # W <- W - lr / c1 * u / (sqrt(v / c2) + eps), a run of elements at a time.
        for run, pruned in self.pruned_runs(index):
            dense[run].mul_(1 - rate * param_group["weight_decay"])
            first[run].lerp_(gradients[run], 1 - beta1)
            change = torch.addcmul(first[run], dense[run], pruned, value=self.decay)
            second[run].mul_(beta2).addcmul_(change, change, value=1 - beta2)
            divisor = second[run].sqrt().div_(math.sqrt(1 - beta2**count)).add_(param_group["eps"])
            dense[run].addcdiv_(change, divisor, value=-rate / (1 - beta1**count))
        return None
