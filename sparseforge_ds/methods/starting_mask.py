"""A mask that is chosen once, before the first step, for plain retraining.

The scores are those of `importance`: W^2 (magnitude), W^2 (|x|^2 + eps) (Wanda, arXiv 2306.11695, eq. 1, squared),
H W^2, or SparseGPT's, which updates weights as well. eps is `curvature.damping` times the mean of |x|^2; it ranks by
magnitude where x is 0. With `start` every decoder block is trained, too (`start.block_start`).
"""

from __future__ import annotations

import torch
from typing_extensions import override

from sparseforge_ds.mask.kernels.groups import survivors
from sparseforge_ds.methods.method import MaskMethod
from sparseforge_ds.zero.extra_passes import Closure, ProbeBatches


class StartingMask(MaskMethod):
    """Mask that is chosen before the first step and kept: method `naive_retrain`, and base of others."""

    @override
    def require_start_probe(self, probe: Closure | ProbeBatches | None) -> None:
        super().require_start_probe(probe)
        self.ranking.curvature.require_probe(probe, "start")

    @override
    def measure_start(self, probe: Closure | ProbeBatches | None) -> None:
        """Measure the curvature that the mask is chosen by. Collective.

        Raises:
            ForgeError: it is not finite.
        """
        super().measure_start(probe)
        self.ranking.curvature.refresh(probe, self.write_masters)
        self.ranking.curvature.require_refreshed()

    @override
    @torch.no_grad()
    def start(self) -> None:
        """Take the N best of every group as the mask. Collective.

        Raises:
            ForgeError: there is no usable curvature.
        """
        super().start()
        if self._block_start is not None:
            return
        weights = self.weights
        for shard, score_GM in self.ranking.scored():
            target = weights.from_groups(shard, survivors(score_GM, weights.pattern))
            weights.state.write_mask(shard, target)
            weights.add_update(shard, target, target)
        self.ranking.report()  # which resets the sums; no step has been made that they would belong to
