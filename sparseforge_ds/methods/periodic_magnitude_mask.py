"""A mask of the largest weights that is chosen anew while training, as in SR-STE, AST, CAST, ELSA and PAT.

The choice is made inside the optimizer's step, from the weights that it just wrote, and is published by that step. So
nothing is gathered twice, and ranks exchange only the missing members of cut groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config.methods import RefreshedMaskConfig
from sparseforge_ds.curvature.ranking import Ranking
from sparseforge_ds.mask.anneal import progress
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.methods.starting_mask import StartingMask
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.extra_passes import Closure, ProbeBatches
from sparseforge_ds.zero.shard import Shard


class PeriodicMagnitudeMask(StartingMask):
    """Top N of W^2 in every group, chosen every `method.every` steps; a starting mask before the first of them."""

    chooses_at_freeze = False
    """True if the freeze chooses the mask once more, from the final weights."""

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        assert isinstance(weights.config.method, RefreshedMaskConfig)
        self.settings = weights.config.method
        self.needs_republish = False
        steps = [round(end * weights.config.max_steps) for end in self.settings.ramp]
        self._ramp = (steps[0], steps[1])

    @override
    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """Return metrics where they are due; the masks have moved in the optimizer's step."""
        if not self.weights.schedule.is_update(step) and not self.weights.schedule.is_projection(step):
            return None
        self.weights.account()
        return self.ranking.report()

    @override
    def publish(self, index: int, dense: Tensor, before: Tensor | None, out: Tensor, step: int) -> None:
        if step < self.settings.dense_until(self.weights.config.max_steps):
            out.copy_(dense.view(out.shape))
        else:
            super().publish(index, dense, before, out, step)

    @property
    def decay(self) -> float:
        """Lambda at the step that is being made."""
        return self.settings.decay * progress(self.weights.step, self._ramp)

    def pruned_runs(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a master partition's elements, each with its fp32 1 - mask, which is 1 in the padding.

        Once masks are frozen, a pull on pruned weights does nothing: they are 0.
        """
        state = self.weights.state
        if state.released:
            yield from ((chunk, (~kept).float()) for chunk, kept in state.kept_chunks(index))
            return
        mask = state.partition(index)["mask"].view(-1)
        yield from ((chunk, (~mask[chunk]).float()) for chunk in chunks(mask))

    @override
    def after_step(self, index: int, param_group: dict[str, Any]) -> None:
        """Choose the mask anew where that is due."""
        step = self.next_step
        if step <= self.weights.schedule.freeze_step and self.is_due(step):
            self._choose_again(index)

    def is_due(self, step: int) -> bool:
        """Return True if the mask is chosen anew by optimizer step `step`."""
        is_last = self.chooses_at_freeze and step == self.weights.schedule.freeze_step
        return is_last or step % self.settings.every == 0

    def score(self, shard: Shard) -> Tensor:
        """Return the (numel of the shard,) scores of which a choice keeps the N largest of every group."""
        return self.weights.dense(shard).square()  # a pattern of pairs adds scores up

    @torch.no_grad()
    def _choose_again(self, index: int) -> None:
        weights = self.weights
        names = [shard.name for shard in weights.layout.shards_in[index]]
        halo = weights.halo.exchange(self.score, names)
        for chunk in weights.chunks(names):
            weights.state.write_mask(chunk, weights.top(chunk, self.score(chunk), halo))
