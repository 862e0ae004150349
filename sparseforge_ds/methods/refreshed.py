"""A mask of the largest weights that is chosen anew while training: what SR-STE, AST and CAST have in common.

The choice is made inside the optimizer's step, from the weights that it just wrote, and is published by that step:
nothing is gathered twice, and of cut groups only the missing members travel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.mask.anneal import progress
from sparseforge_ds.methods.fixed import FixedMask
from sparseforge_ds.methods.ground import Ground
from sparseforge_ds.methods.ranking import Ranking
from sparseforge_ds.zero.probe import Closure, ProbeBatches


class RefreshedMask(FixedMask):
    """Top N of |W| in every group, every `refresh.every` steps; before the first of them a starting mask."""

    def __init__(self, ground: Ground, ranking: Ranking) -> None:
        super().__init__(ground, ranking)
        assert ground.config.refresh is not None
        self.part = ground.config.refresh
        self.moved = False
        steps = [round(end * ground.config.max_steps) for end in self.part.ramp]
        self._ramp = (steps[0], steps[1])

    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """See `Rule`; masks have moved already, and are looked at."""
        if not self.on.schedule.is_update(step) and not self.on.schedule.is_projection(step):
            return None
        self.on.account()
        return self.ranking.report()

    @property
    def decay(self) -> float:
        """lambda at the step that is being made."""
        return self.part.decay * progress(self.on.step, self._ramp)

    def pruned(self, index: int) -> tuple[Tensor, Tensor]:
        """(dense, 1 - mask) of a master partition, flat; where it is padded both are 0 and 1."""
        state = self.on.publication.state(index)
        return state["dense"], 1 - state["mask"]

    def after_step(self, index: int, group: dict[str, Any]) -> None:
        """See `Rule`."""
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
        missing = on.edges.exchange(on.reader(lambda shard: on.of(shard, "dense").abs()), names)
        for piece in on.pieces(names):
            on.of(piece, "mask").copy_(on.top(piece, on.of(piece, "dense").abs(), missing))
