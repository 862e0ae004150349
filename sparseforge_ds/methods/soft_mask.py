"""SparseForge: a soft mask that anneals to N:M (arXiv 2605.06402, Algorithm 1; eqs. 1 to 11).

The numbers of equations are those of docs/concepts/equations.md.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config.soft_mask_config import SoftMaskConfig
from sparseforge_ds.curvature.ranking import Ranking, ScoreInputs
from sparseforge_ds.curvature.tiled_shards import TiledShards, tiled_shards
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.kernels.codes import stored_as
from sparseforge_ds.mask.kernels.fused_update import MaskUpdate, update_mask_in_place
from sparseforge_ds.mask.kernels.publication import soft_publish, soft_step
from sparseforge_ds.methods.method import MaskMethod
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.extra_passes import Closure, ProbeBatches
from sparseforge_ds.zero.shard import Shard


class SoftMask(MaskMethod):
    """Soft masks: gates every T_update steps, hardening, projection.

    Between two updates masks stand still, and so does their top N: steps read it from `ShardState.kept`.
    """

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        assert isinstance(weights.config.method, SoftMaskConfig)
        self.settings = weights.config.method
        self.schedule = self.settings.schedule(weights.config.max_steps)
        self._tiled: TiledShards | None = None
        """Shards whose masks are moved a partition at a time, from the first move to the freeze."""

    @property
    @override
    def needs_previous_weights(self) -> bool:
        """True while masks move, unless `straight_through` is set: W then keeps only its share of a step."""
        keeps_share = (
            not self.settings.straight_through and self._masks_moved and self.weights.step < self.schedule.freeze_step
        )
        return keeps_share or super().needs_previous_weights

    @property
    @override
    def needs_start(self) -> bool:
        return self._block_start is not None

    @override
    def resume(self) -> None:
        self.written_masters = ()
        if self._masks_moved and not self.weights.state.released:
            self._find_kept()

    @override
    def measures(self, step: int) -> bool:
        """Return True if the step has an update."""
        return self.schedule.is_update(step)

    @override
    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """Take a new curvature and move the masks, or freeze them, where that is due."""
        if self.schedule.is_update(step):
            self.ranking.curvature.refresh(probe, self.write_masters)
            return self.move() if self.ranking.curvature.has_sample else None
        return self.project() if self.schedule.is_projection(step) else None

    @property
    def _masks_moved(self) -> bool:
        """True once masks have moved. Before that all are 1, and the top N of a group means nothing."""
        return self.weights.step >= self.schedule.update_every and self.ranking.curvature.has_sample

    @override
    def publish(self, index: int, dense: Tensor, before: Tensor | None, out: Tensor, step: int) -> None:
        """Let W keep its share of the step, and write m_eff W (eqs. 1 and 10).

        In plain gradient descent on the loss of m_eff W the chain rule gives the step a factor m_eff. Adam divides it
        out again: pruned weights would move as far as others, along gradients that do not change the loss, and their
        scores would move with them. So W <- W' + m_eff (W - W'), with the mask that the gradient was taken at.
        """
        if self.weights.state.released or not self._masks_moved:
            super().publish(index, dense, None, out, step)
            return
        dials = self.schedule.dials
        self._publish(index, dense, before, out, dials(step - 1).x, dials(step).x)

    @override
    def publish_hard(self, index: int, dense: Tensor, out: Tensor) -> None:
        if self._masks_moved and not self.weights.state.released:
            self._publish(index, dense, None, out, 1.0, 0.0)
        else:
            super().publish_hard(index, dense, out)

    def _publish(
        self, index: int, dense: Tensor, before: Tensor | None, out: Tensor, x_before: float, x: float
    ) -> None:
        state = self.weights.state
        mask = state.partition(index)["mask"].view(-1)
        kept = state.packed_kept(index)
        if before is not None:
            soft_step(dense.view(-1), before.view(-1), mask, kept, x_before, x, out.view(-1))
        else:
            soft_publish(dense.view(-1), mask, kept, x, out.view(-1))

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Move all masks by one update (`mask.update.update_mask`, eqs. 3 to 9), and return metrics of them."""
        weights = self.weights
        dials = self.schedule.dials(weights.step)
        if self._tiled is None:
            self._tiled = tiled_shards(weights)
        tiled = self._tiled
        # A student that still equals its teacher has no gradient: masks by magnitude make the two differ.
        inputs = self.ranking.score_inputs(magnitude_without_gradient=True, tiled=tiled)
        midpoint = self.settings.threshold == "midpoint"
        # Whole partitions first, where two kernels can take them.
        if tiled is not None:
            tiled.move(inputs.factors, inputs.by_magnitude, inputs.scaling, dials, midpoint)
            self.written_masters = tiled.complete
        # A shard boundary cuts groups. Fetch their missing members, so that each rank decides whole groups.
        by_elements = weights.config.keeps_elements and not weights.config.factored
        keys = ("dense", "mask", "curvature") if by_elements else ("dense", "mask")
        halos = {key: weights.exchange(key) for key in keys}
        stored = partial(stored_as, dtype=weights.state.mask_dtype)
        halos["mask"] = {name: (stored(head), stored(tail)) for name, (head, tail) in halos["mask"].items()}
        for chunk in weights.chunks(None if tiled is None else tiled.rest):
            own = {key: weights.state_view(chunk, key) for key in keys}
            with_halo = {key: weights.halo.with_halo(chunk, own[key], halos[key]) for key in keys}
            update = self._update_chunk(chunk, with_halo, inputs, dials)
            # Keep the members of this rank's own shard.
            if with_halo["mask"] is not own["mask"]:
                own["mask"].copy_(weights.halo.without_halo(chunk, with_halo["mask"]))
            target = weights.halo.without_halo(chunk, update.target)
            kept = weights.halo.without_halo(chunk, update.kept)
            weights.add_update(chunk, own["mask"], target, kept, update.disagrees)
        return self.ranking.report() | self.ranking.curvature.expert_load.metrics()

    def _update_chunk(
        self, chunk: Shard, with_halo: dict[str, Tensor], inputs: ScoreInputs, dials: Dials
    ) -> MaskUpdate:
        """Update the mask of a chunk, matrix by matrix, in `with_halo`, which has the states of whole groups."""
        weight = self.weights.prunable[chunk.name]
        updates = []
        # A chunk of fused experts has several matrices, each with a scaling of its own.
        for inside, curvature, row in inputs.per_matrix(
            self.weights.halo.span_with_halo(chunk), with_halo.get("curvature")
        ):
            update = update_mask_in_place(
                with_halo["dense"][inside],
                with_halo["mask"][inside],
                curvature,
                inputs.scaling[row],
                dials,
                self.weights.pattern,
                weight.shape,
                weight.input_axis,
                midpoint=self.settings.threshold == "midpoint",
            )
            updates.append(update)
        if len(updates) == 1:  # without a copy
            return updates[0]
        return MaskUpdate(*(torch.cat(choices) for choices in zip(*updates, strict=True)))

    @torch.no_grad()
    def project(self) -> dict[str, float]:
        """Freeze every mask at its top N: m <- hard(m), eq. 11."""
        weights = self.weights
        self._tiled = None
        self.ranking.curvature.require_refreshed()
        for chunk in weights.chunks():
            kept = weights.state.read_kept(chunk)
            weights.state.write_mask(chunk, kept)
            weights.add_update(chunk, kept, kept)
        return self.ranking.report()

    @torch.no_grad()
    def _find_kept(self) -> None:
        """Store hard(m) for the steps until the next update. Collective."""
        weights = self.weights
        halo = weights.exchange("mask")
        for chunk in weights.chunks():
            weights.state.write_kept(chunk, weights.top(chunk, weights.state.mask(chunk), halo))
