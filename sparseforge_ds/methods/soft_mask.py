"""SparseForge: a soft mask that anneals to N:M (arXiv 2605.06402, Algorithm 1; design eqs. 1 to 11)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config.soft_mask_config import SoftMaskConfig
from sparseforge_ds.mask.kernels.codes import stored_as
from sparseforge_ds.mask.kernels.fused_update import update_mask_in_place
from sparseforge_ds.mask.kernels.publication import soft_publish, soft_step
from sparseforge_ds.methods.method import MaskMethod
from sparseforge_ds.methods.ranking import Ranking
from sparseforge_ds.methods.sharded_weights import ShardedWeights
from sparseforge_ds.zero.probe import Closure, ProbeBatches


class SoftMask(MaskMethod):
    """Gates and masks every T_update steps, hardening, projection. Between two updates masks stand still, and so
    does their top N: steps read it from `ShardState.kept`."""

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        assert isinstance(weights.config.method, SoftMaskConfig)
        self.part = weights.config.method
        self.schedule = self.part.schedule(weights.config.max_steps)

    @property
    @override
    def needs_previous_weights(self) -> bool:
        """While masks move, plain gradient descent needs it."""
        follows = not self.part.straight_through and self._formed and self.on.step < self.schedule.freeze_step
        return follows or super().needs_previous_weights

    @property
    @override
    def needs_start(self) -> bool:
        return False

    @override
    def resume(self) -> None:
        if self._formed and not self.on.state.released:
            self._find_kept()

    @override
    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        if self.schedule.is_update(step):
            self.ranking.mean.refresh(probe, self.write_masters)
            return self.move() if self.ranking.mean.ready else None
        return self.project() if self.schedule.is_projection(step) else None

    @property
    def _formed(self) -> bool:
        """Whether masks have moved yet: while all are 1, every group is a tie and its top N an accident of order."""
        return self.on.step >= self.schedule.update_every and self.ranking.mean.ready

    @override
    def publish(self, index: int, dense: Tensor, before: Tensor | None, out: Tensor, step: int) -> None:
        """Eqs. 1 and 10, and before them the share of the step that W keeps.

        Plain gradient descent on the loss of m_eff W has the factor m_eff from the chain rule. Adam divides it out
        again: pruned weights would move as far as the others, by gradients that change nothing, and so would their
        scores. So W <- W' + m_eff (W - W'), with the mask that the gradient was taken at.
        """
        if self.on.state.released or not self._formed:
            super().publish(index, dense, None, out, step)
            return
        dials = self.schedule.dials
        self._publish(index, dense, before, out, dials(step - 1).x, dials(step).x)

    @override
    def publish_hard(self, index: int, dense: Tensor, out: Tensor) -> None:
        if self._formed and not self.on.state.released:
            self._publish(index, dense, None, out, 1.0, 0.0)
        else:
            super().publish_hard(index, dense, out)

    def _publish(
        self, index: int, dense: Tensor, before: Tensor | None, out: Tensor, x_before: float, x: float
    ) -> None:
        state = self.on.state
        mask, dense, out = state.partition(index)["mask"].view(-1), dense.view(-1), out.view(-1)
        if before is not None:
            soft_step(dense, before.view(-1), mask, state.packed_kept(index), x_before, x, out)
        else:
            soft_publish(dense, mask, state.packed_kept(index), x, out)

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Scores, gates and masks of all weights (eqs. 3 to 9)."""
        on = self.on
        dials = self.schedule.dials(on.step)
        # The first soft masks make a student differ from a teacher that it equals, and the loss has a gradient then.
        scoring = self.ranking.scoring(magnitude_without_gradient=True)
        by_elements = on.config.keeps_elements and not on.config.factored
        keys = ("dense", "mask", "curvature") if by_elements else ("dense", "mask")
        halo = {key: on.exchange(key) for key in keys}
        stored = partial(stored_as, dtype=on.state.mask_dtype)
        halo["mask"] = {name: (stored(head), stored(tail)) for name, (head, tail) in halo["mask"].items()}
        for chunk in on.chunks():
            weight, whole = on.weights[chunk.name], on.halo.span_with_halo(chunk)
            mine = {key: on.of(chunk, key) for key in keys}
            wide = {key: on.halo.with_halo(chunk, mine[key], halo[key]) for key in keys}
            chosen = []
            for inside, curvature, scaling in scoring.of(whole, wide.get("curvature")):
                place = (on.pattern, weight.shape, weight.input_axis, self.part.threshold == "midpoint")
                given = (wide["dense"][inside], wide["mask"][inside], curvature, scaling, dials)
                chosen.append(update_mask_in_place(*given, *place))
            target, kept, disagrees = (torch.cat(one) if len(one) > 1 else one[0] for one in zip(*chosen, strict=True))
            if wide["mask"] is not mine["mask"]:
                mine["mask"].copy_(on.halo.without_halo(chunk, wide["mask"]))
            target, kept = on.halo.without_halo(chunk, target), on.halo.without_halo(chunk, kept)
            on.add_update(chunk, mine["mask"], target, kept, disagrees)
        return self.ranking.report() | on.load.metrics()

    @torch.no_grad()
    def project(self) -> dict[str, float]:
        """m <- hard(m), eq. 11."""
        on = self.on
        self.ranking.mean.require_refreshed()
        for chunk in on.chunks():
            kept = on.state.read_kept(chunk)
            on.state.write_mask(chunk, kept)
            on.add_update(chunk, kept, kept)
        return self.ranking.report()

    @torch.no_grad()
    def _find_kept(self) -> None:
        """hard(m), for the steps until the next update. Collective."""
        on = self.on
        halo = on.exchange("mask")
        for chunk in on.chunks():
            on.state.write_kept(chunk, on.top(chunk, on.state.mask(chunk), halo))
