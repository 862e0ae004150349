"""SR-STE: straight-through training of the N largest, with a pull on the others (arXiv 2102.04010, eq. 9)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from sparseforge_ds.curvature.ranking import Ranking
from sparseforge_ds.methods.periodic_magnitude_mask import PeriodicMagnitudeMask
from sparseforge_ds.sharded_weights import ShardedWeights


class SrSte(PeriodicMagnitudeMask):
    """SR-STE: the gradient of W is g(m W) + lambda (1 - m) W, and Adam's moments see both terms."""

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        weights.require_gradients(f'steps of method "{weights.config.method.name}"')

    @override
    def before_step(self, index: int, gradient: Tensor, param_group: dict[str, Any]) -> Tensor | None:
        """Add the pull on what is pruned (eq. 9) to the gradient."""
        # Once masks are released, what is pruned is 0.
        if not self.decay or self.weights.state.released:
            return gradient
        dense = self.weights.state.weights_being_trained(index).view(-1)
        flat = gradient.view(-1)
        for run, pruned in self.pruned_runs(index):
            flat[run].addcmul_(dense[run], pruned, value=self.decay)
        return gradient
