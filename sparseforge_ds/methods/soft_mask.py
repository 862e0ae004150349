"""SparseForge: a soft mask that anneals to N:M (arXiv 2605.06402, Algorithm 1; design eqs. 1 to 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.quench import effective_mask, follow, publish
from sparseforge_ds.mask.update import move_groups
from sparseforge_ds.methods.ground import Ground
from sparseforge_ds.methods.ranking import Ranking
from sparseforge_ds.methods.rule import Rule
from sparseforge_ds.zero.edges import Missing
from sparseforge_ds.zero.probe import Closure, ProbeBatches
from sparseforge_ds.zero.shard import Shard


class SoftMask(Rule):
    """Gates and masks every T_update steps, hardening, projection."""

    def __init__(self, ground: Ground, ranking: Ranking) -> None:
        super().__init__(ground, ranking)
        self._mask_edges: Missing = {}

    @property
    def remembers(self) -> bool:
        """See `Rule`; a frozen mask leaves nothing to decide by the weights that it removed."""
        schedule = self.on.config.schedule
        return not schedule.straight_through and self._formed and self.on.step < self.on.schedule.freeze_step

    @property
    def starts(self) -> bool:
        """See `Rule`."""
        return False

    def resume(self) -> None:
        """See `Rule`; hardening may begin before the first update."""
        self._mask_edges = self.on.exchange("mask")

    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """See `Rule`."""
        if self.on.schedule.is_update(step):
            self.ranking.refresh(probe)
            return self.move() if self.ranking.ready else None
        return self.project() if self.on.schedule.is_projection(step) else None

    @property
    def _formed(self) -> bool:
        """Whether masks have moved yet: while all are 1, every group is a tie and its top N an accident of order."""
        return self.on.step >= self.on.schedule.update_every and self.ranking.ready

    def publish(self, shard: Shard, dense: Tensor, mask: Tensor, out: Tensor, step: int, hard: bool) -> None:
        """See `Rule`; eq. 10."""
        if step <= self.on.schedule.freeze_step and self._formed:
            before = self.on.publication.before(shard)
            x = 0.0 if hard else self.on.schedule.dials(step).x
            x_before = 1.0 if before is None else self.on.schedule.dials(step - 1).x
            top = None if min(x, x_before) == 1.0 else self.on.top(shard, mask, self._mask_edges)
            if before is not None:
                follow(dense, before, _effective(mask, top, x_before))
            mask = _effective(mask, top, x)
        publish(dense, mask, out)

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Scores, gates and masks of all weights (eqs. 3 to 9)."""
        on = self.on
        dials = on.schedule.dials(on.step)
        scoring = self.ranking.measure()
        by_elements = on.config.keeps_elements and not on.config.factored
        keys = ("dense", "mask", "curvature") if by_elements else ("dense", "mask")
        missing = {key: on.exchange(key) for key in keys}
        for piece in on.pieces():
            weight, whole = on.weights[piece.name], on.edges.widened(piece)
            mine = {key: on.of(piece, key) for key in keys}
            wide = {key: on.edges.widen(piece, mine[key], missing[key]) for key in keys}
            chosen = []
            for inside, curvature, scaling in scoring.of(whole, wide.get("curvature")):
                place = (on.pattern, weight.shape, weight.input_axis, on.config.threshold == "midpoint")
                given = (wide["dense"][inside], wide["mask"][inside], curvature, scaling, dials)
                chosen.append(move_groups(*given, *place))
            target, kept, disagrees = (torch.cat(one) if len(one) > 1 else one[0] for one in zip(*chosen, strict=True))
            mask = mine["mask"]
            if wide["mask"] is not mask:
                mask.copy_(on.edges.own(piece, wide["mask"]))
            on.add_moved(piece, mask, on.edges.own(piece, target), on.edges.own(piece, kept), disagrees)
        self._mask_edges = on.exchange("mask")
        return self.ranking.report() | on.load.metrics()

    @torch.no_grad()
    def project(self) -> dict[str, float]:
        """m <- hard(m), eq. 11."""
        on = self.on
        self.ranking.require_refreshed()
        for piece in on.pieces():
            mask = on.of(piece, "mask")
            hard = on.top(piece, mask, self._mask_edges)
            mask.copy_(hard)
            on.add_update(piece, mask, hard)
        self._mask_edges = on.exchange("mask")
        return self.ranking.report()


def _effective(mask: Tensor, top: Tensor | None, x: float) -> Tensor:
    """m_eff, with no work where x = 1."""
    return mask if x == 1.0 or top is None else effective_mask(mask, top, x)
