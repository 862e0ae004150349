"""A mask that is chosen once, before the first step: what one-shot pruning leaves, and what retraining starts from.

The scores are those of `importance`: W^2 (magnitude), W^2 |x|^2 (Wanda, arXiv 2306.11695, eq. 1, squared), H W^2, or
SparseGPT's, which updates weights as well. With `start` every decoder block is trained, too (`block_start`).
"""

from __future__ import annotations

import torch
from typing_extensions import override

from sparseforge_ds.mask.kernels.groups import top_n
from sparseforge_ds.methods.block_start import BlockStart, start_of
from sparseforge_ds.methods.method import MaskMethod
from sparseforge_ds.methods.ranking import Ranking
from sparseforge_ds.methods.sharded_weights import ShardedWeights
from sparseforge_ds.zero.probe import Closure, ProbeBatches, batches_of


class FixedMask(MaskMethod):
    """`oneshot`, where no training follows, and `naive_retrain`, where it does."""

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        start = start_of(weights.config)
        self._by_block = None if start is None else BlockStart(weights, ranking.mean.probe, start)

    @override
    def start(self, probe: Closure | ProbeBatches | None) -> None:
        self.choose(probe)

    @torch.no_grad()
    def choose(self, probe: Closure | ProbeBatches | None) -> dict[str, float]:
        """Take the N best of every group as the mask; metrics of it. Collective. Raises ForgeError where there is no
        usable curvature."""
        on = self.on
        if self._by_block is not None:
            if probe is None:
                who = 'importance "sparsegpt"' if on.config.start is None else "sparseforge.start"
                raise ValueError(f"{who} needs calibration batches: call forge.start(probe)")
            self._by_block.run(batches_of(probe))
            on.account()
            return self.ranking.report()
        self.ranking.mean.refresh(probe, self.write_masters)
        self.ranking.mean.require_refreshed()
        for shard, score_GM in self.ranking.scored():
            target = on.from_groups(shard, top_n(score_GM, on.pattern.kept))
            on.state.write_mask(shard, target)
            on.add_update(shard, target, target)
        return self.ranking.report() | on.load.metrics()
