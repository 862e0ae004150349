"""A mask of the largest weights that is chosen anew while training: what SR-STE, AST and CAST have in common.

The choice is made inside the optimizer's step, from the weights that it just wrote, and is published by that step:
nothing is gathered twice, and of cut groups only the missing members travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config.methods import RefreshedMaskConfig
from sparseforge_ds.mask.anneal import progress
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.methods.fixed import FixedMask
from sparseforge_ds.methods.ranking import Ranking
from sparseforge_ds.methods.sharded_weights import ShardedWeights
from sparseforge_ds.zero.probe import Closure, ProbeBatches


class RefreshedMask(FixedMask):
    """Top N of |W| in every group, every `method.every` steps; before the first of them a starting mask."""

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        assert isinstance(weights.config.method, RefreshedMaskConfig)
        self.part = weights.config.method
        self.needs_republish = False
        steps = [round(end * weights.config.max_steps) for end in self.part.ramp]
        self._ramp = (steps[0], steps[1])

    @override
    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """Masks have moved already, and are looked at."""
        if not self.on.schedule.is_update(step) and not self.on.schedule.is_projection(step):
            return None
        self.on.account()
        return self.ranking.report()

    @property
    def decay(self) -> float:
        """lambda at the step that is being made."""
        return self.part.decay * progress(self.on.step, self._ramp)

    def pruned_runs(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """Runs of a master partition's elements, and the fp32 1 - mask of each; 1 where it is padded. Nothing of a
        frozen mask is pulled any more: what it pruned is 0."""
        state = self.on.state
        if state.released:
            yield from ((chunk, (~kept).float()) for chunk, kept in state.kept_chunks(index))
            return
        mask = state.partition(index)["mask"].view(-1)
        yield from ((chunk, (~mask[chunk]).float()) for chunk in chunks(mask))

    @override
    def after_step(self, index: int, group: dict[str, Any]) -> None:
        step = self.on.step + 1
        if step <= self.on.schedule.freeze_step and self.is_due(step):
            self._choose_again(index)

    def is_due(self, step: int) -> bool:
        """Whether the mask is chosen anew by optimizer step `step`."""
        return step % self.part.every == 0

    @torch.no_grad()
    def _choose_again(self, index: int) -> None:
        on = self.on
        names = [name for name, shard in on.shards.items() if shard.flat == index]
        halo = on.halo.exchange(on.reader(lambda shard: on.dense(shard).abs()), names)
        for chunk in on.chunks(names):
            on.state.write_mask(chunk, on.top(chunk, on.dense(chunk).abs(), halo))
