"""Base of the methods: the calls that a forge makes around every optimizer step.

A method decides which mask a partition is published with, and what happens at an update and at the freeze. It may also
change gradients before the optimizer's step, or weights after it. It works on the shards that all methods share, which
know about cut groups, checkpoints and metrics. The steps at which masks move and freeze are its config's (`schedule`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.curvature.ranking import Ranking
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.codes import values_of
from sparseforge_ds.mask.kernels.publication import publish
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.start.block_start import BlockStart
from sparseforge_ds.zero.extra_passes import Closure, ProbeBatches


class MaskMethod:
    """Base class of the methods; by default a mask never moves, and m W is published.

    An `index` is that of a master partition, a flat tensor with this rank's elements of many weights.
    """

    needs_republish = True
    """True if `update` moves masks after the step has published, so that weights must be published once more."""
    trains_the_rest = True
    """True if weights that are not prunable are trained."""

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        self.weights = weights
        self.ranking = ranking
        self.written_masters: Collection[int] = ()
        """Partitions whose masters `update` has written already, until the next `write_masters`."""
        self._block_start = (
            BlockStart(weights, ranking.curvature.extra_passes) if weights.config.starts_by_block else None
        )

    @property
    def next_step(self) -> int:
        """Number of the optimizer step that is being made, the first being 1."""
        return self.weights.step + 1

    @property
    def needs_start(self) -> bool:
        """True if `start` must come before the first step."""
        return True

    @property
    def needs_previous_weights(self) -> bool:
        """True if publishing the step in progress needs W as it was before the step."""
        return self.weights.state.frozen and not self.weights.state.released

    def require_start_probe(self, probe: Closure | ProbeBatches | None) -> None:
        """Raise ValueError if `measure_start` cannot work with this probe."""
        if self._block_start is not None:
            self._block_start.require_probe(probe)

    def measure_start(self, probe: Closure | ProbeBatches | None) -> None:
        """Measure what `start` needs. Collective.

        Weights and masks stay as they are. Only an estimate of elements may leave weights displaced after an error.
        """
        if self._block_start is not None:
            self._block_start.read(probe)

    def start(self) -> None:
        """Choose the masks of the first step from what `measure_start` has measured. Collective.

        A block-wise start trains the blocks, too.
        """
        if self._block_start is not None:
            self._block_start.run()

    def measures(self, step: int) -> bool:
        """Return True if `update` takes a new curvature after optimizer step `step`."""
        return False

    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """Do what is due after optimizer step `step`. Collective. Return metrics of the masks if they were updated."""
        return None

    def resume(self) -> None:
        """Prepare for the next step after states were read from a checkpoint. Collective."""

    def publish(self, index: int, dense: Tensor, before: Tensor | None, out: Tensor, step: int) -> None:
        """Write m_eff W of a master partition after optimizer step `step`.

        `dense` is W, laid out like the master `out`; `before` is W before the step, if `needs_previous_weights` and a
        step was made, and may be the memory of `out`.
        """
        state = self.weights.state
        if state.released:
            out.copy_(dense.view(out.shape))  # what is pruned is +0.0 in it
            return
        mask = state.partition(index)["mask"].view(-1)
        dense = dense.view(-1)
        for chunk in chunks(mask):
            effective = values_of(mask[chunk])
            # A branch will start from the weights that a frozen mask removes: undo the step for these.
            if before is not None:
                dense[chunk] = torch.where(effective != 0, dense[chunk], before.view(-1)[chunk])
            publish(dense[chunk], effective, out.view(-1)[chunk])

    def publish_hard(self, index: int, dense: Tensor, out: Tensor) -> None:
        """Publish as if masks were frozen now."""
        MaskMethod.publish(self, index, dense, None, out, self.weights.step)

    def write_master(self, index: int, dense: Tensor, before: Tensor | None, step: int, hard: bool = False) -> None:
        """Write a master partition after optimizer step `step`: m_eff W (eq. 1), or Q(m_eff W) (eq. 14).

        Arguments as in `publish`. `hard` is as if masks were frozen now. Collective if weights are quantized.
        """
        master = self.weights.layout.flats[index].data
        if hard:
            self.publish_hard(index, dense, master)
        else:
            self.publish(index, dense, before, master, step)
        if self.weights.quantizer is not None and self.weights.config.is_quantized(step, hard):
            self.weights.quantizer.quantize(index)

    @torch.no_grad()
    def write_masters(self, hard: bool = False) -> None:
        """Do `write_master` for every prunable partition, outside an optimizer step. Collective.

        `ShardLayout.push` makes it visible.
        """
        written = () if hard else self.written_masters
        self.written_masters = ()
        for index in self.weights.state.shards_in:
            dense = self.weights.state.separate_dense(index)
            # Where W is not kept beside the master, the master is W, and there is nothing to write.
            if dense is not None and index not in written:
                self.write_master(index, dense, None, self.weights.step, hard)

    def before_step(self, index: int, gradient: Tensor, param_group: dict[str, Any]) -> Tensor | None:
        """Return the gradient for the optimizer's step of a master partition; None leaves the partition as it is.

        `gradient` is averaged, unscaled and clipped, laid out like the master, and may be changed in place.
        `param_group` is the optimizer's.
        """
        return gradient

    def after_step(self, index: int, param_group: dict[str, Any]) -> None:
        """Change a partition after the optimizer's step, before it is published. May be collective."""
