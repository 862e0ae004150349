"""ELSA: ADMM on the loss of the whole model (arXiv 2510.01650, section 3 and its authors' optimizer).

The problem min f(W) + I(z), subject to W = z, z of the pattern, is solved by three updates with the scaled dual u. Adam
steps W on f(W) + lambda / 2 |W - z + u|^2, of which it sees the gradient g + lambda (W - z + u), not clipped. Every
`every` steps z <- top N of F (W + u)^2 in each group, with F the second moment of Adam, and then u <- u + W - z. The
freeze cuts W itself to its top N of F W^2.

With v = W + u at the last projection, z = m v and u = (1 - m) v. So v and the mask are all that is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.curvature.ranking import Ranking
from sparseforge_ds.methods.periodic_magnitude_mask import PeriodicMagnitudeMask
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.shard import Shard


class Elsa(PeriodicMagnitudeMask):
    """ELSA's updates around the steps of the engine's Adam; the state `split` is v."""

    chooses_at_freeze = True

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        weights.require_adam("elsa")

    @override
    def start(self) -> None:
        """Let z be the projection of W, and u be 0."""
        super().start()
        weights = self.weights
        for chunk in weights.chunks():
            torch.mul(weights.dense(chunk), weights.state.mask(chunk), out=weights.state_view(chunk, "split"))

    @override
    def before_step(self, index: int, gradient: Tensor, param_group: dict[str, Any]) -> Tensor | None:
        """Add the gradient of the penalty, lambda (W - z + u)."""
        state = self.weights.state
        if self.weights.step < self.weights.schedule.freeze_step:
            dense = state.weights_being_trained(index).view(-1)
            split = state.partition(index)["split"].view(-1)
            flat = gradient.view(-1)
            for run, pruned in self.pruned_runs(index):
                # u - z is v where the mask is 0, and -v where it is 1.
                distance = torch.addcmul(dense[run], split[run], pruned.mul_(2).sub_(1))
                flat[run].add_(distance, alpha=self.decay)
        return gradient

    @override
    def score(self, shard: Shard) -> Tensor:
        weights = self.weights
        is_last = self.next_step == weights.schedule.freeze_step
        values = weights.dense(shard) if is_last else weights.state_view(shard, "split")
        second = shard.slice_of_flat(weights.state.partition(shard.flat)["exp_avg_sq"])
        return second.float() * values.square()

    @torch.no_grad()
    @override
    def _choose_again(self, index: int) -> None:
        # v <- W + u, with the mask of the last projection.
        state = self.weights.state
        dense = state.weights_being_trained(index).view(-1)
        split = state.partition(index)["split"].view(-1)
        for run, pruned in self.pruned_runs(index):
            split[run] = torch.addcmul(dense[run], split[run], pruned)
        super()._choose_again(index)
