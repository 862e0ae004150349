"""A mask that is chosen once, before the first step: what one-shot pruning leaves, and what retraining starts from.

The scores are those of `importance`: W^2 (magnitude), W^2 |x|^2 (Wanda, arXiv 2306.11695, eq. 1, squared), H W^2.
"""

from __future__ import annotations

import torch

from sparseforge_ds.mask.pattern import top_n
from sparseforge_ds.methods.rule import Rule
from sparseforge_ds.zero.probe import Closure


class FixedMask(Rule):
    """`oneshot`, where no training follows, and `naive_retrain`, where it does."""

    def start(self, probe: Closure | None) -> None:
        """See `Rule`."""
        self.choose(probe)

    @torch.no_grad()
    def choose(self, probe: Closure | None) -> dict[str, float]:
        """Take the N best of every group as the mask; metrics of it. Collective.

        Raises:
            ForgeError: there is no usable curvature.
        """
        on = self.on
        self.ranking.refresh(probe)
        self.ranking.require_refreshed()
        for shard, score_GM in self.ranking.scored():
            mask = on.of(shard, "mask")
            target = on.from_groups(shard, top_n(score_GM, on.pattern.kept))
            mask.copy_(target)
            on.add_update(shard, mask, target)
        return self.ranking.report() | on.load.metrics()
