"""How a mask is doing: sums over this rank's shards, one reduction, numbers for TensorBoard.

mask/undecided            mean m (1 - m): what is neither kept nor pruned yet (the paper's L_mid)
mask/kept                 mean m
mask/flip_rate            share of weights whose place in the target changed since the last update
mask/disagreement         share of groups whose top N is not the paper's 1[m > theta]
curvature/mean            bias-corrected mean of H
curvature/negative_share  share of weights with H < 0
curvature/signal          cosine between the newest sample and the running mean before it: 0 is pure noise
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseforge_ds.mask.pattern import Pattern, top_n
from sparseforge_ds.mask.quench import disagreement
from sparseforge_ds.mask.runs import runs
from sparseforge_ds.mask.update import Tally, tally
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.zero.moments import Matrices
from sparseforge_ds.zero.shard import Shard

_SUMS = (
    "undecided",
    "kept",
    "flips",
    "count",
    "compared",
    "disagreeing",
    "groups",
    "curvature",
    "negative",
    "agreement",
    "sample_square",
    "average_square",
)
_COLUMN = {name: column for column, name in enumerate(_SUMS)}

CURVATURE_DECADES = (-20.0, 5.0)
"""Range of the curvature histograms, in log10 of |H|."""


class Health:
    """Collects the sums of one mask update, and remembers the target bits of the last (1/8 byte a weight)."""

    def __init__(self, matrices: Matrices, pattern: Pattern) -> None:
        self.matrices = matrices
        self.pattern = pattern
        self._counts = dict.fromkeys(_SUMS, 0.0)
        """What is known on the host."""
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        """On the device of the shards, wherever that is."""
        self._targets: dict[tuple[str, int], Tensor] = {}

    def _add(self, name: str, value: Tensor) -> None:
        """Add () or, beginning at the named one, several of the sums."""
        if self._sums.device != value.device:
            self._sums = self._sums.to(value.device)
        column = _COLUMN[name]
        self._sums[column : column + value.numel()] += value

    def forget_targets(self) -> None:
        """After a checkpoint was loaded: the next update has no target to compare with."""
        self._targets.clear()

    def add_refresh(self, average: Tensor, sample: Tensor) -> None:
        """Account for one shard's new curvature sample, before it enters the running mean."""
        for run in runs(sample):
            new, old = sample[run], average[run]
            self._add("agreement", (new * old).sum(dtype=torch.float64))
            self._add("sample_square", new.square().sum(dtype=torch.float64))
            self._add("average_square", old.square().sum(dtype=torch.float64))

    def add_update(
        self,
        weight: PrunableWeight,
        shard: Shard,
        mask: Tensor,
        target: Tensor,
        curvature: Tensor | None,
        correction: float = 1.0,
    ) -> None:
        """Account for the new mask, target and curvature of a shard or a piece of one, each (numel of it,).

        `correction` is the bias correction by which its running mean is to be divided.
        """
        found = tally(mask, target, target, self._before(shard))
        self._account(shard, found)
        self.add_curvature(curvature, correction)
        span = self.pattern.span(weight.shape, weight.input_axis)
        # Groups that a shard boundary cuts are left out: this rank does not have all of their masks at hand.
        whole = mask[-shard.start % span : mask.numel() - shard.stop % span]
        if shard.start // span < shard.stop // span and whole.numel():
            group_GM = self.pattern.to_groups(whole, weight.shape, weight.input_axis)
            for run in runs(group_GM):
                self._add("disagreeing", disagreement(group_GM[run], top_n(group_GM[run], self.pattern.kept)))
            self._counts["groups"] += group_GM.shape[0]

    def add_moved(
        self, weight: PrunableWeight, shard: Shard, mask: Tensor, target: Tensor, kept: Tensor, disagrees: Tensor
    ) -> Tensor:
        """Account for what an update made of a shard or a piece of one.

        Args:
            weight: that it is of.
            shard: the piece.
            mask: (numel,) new mask, fp32 or codes.
            target: (numel,) bool, see `Chosen`.
            kept: (numel,) bool, see `Chosen`.
            disagrees: of all groups that the piece has a member of, see `Chosen`.

        Returns:
            (ceil(numel / 8),) packed bits of `kept`.
        """
        found = tally(mask, target, kept, self._before(shard))
        self._account(shard, found)
        # Groups that a shard boundary cuts are left out: two ranks have them.
        span = self.pattern.span(weight.shape, weight.input_axis)
        per_span = span // self.pattern.members
        whole = disagrees.view(-1)[per_span * (shard.start % span > 0) :]
        whole = whole[: max(0, shard.stop // span - -(-shard.start // span)) * per_span]
        self._add("disagreeing", whole.sum(dtype=torch.float64))
        self._counts["groups"] += whole.numel()
        return found.kept

    def _before(self, shard: Shard) -> Tensor | None:
        return self._targets.get((shard.name, shard.start))

    def _account(self, shard: Shard, found: Tally) -> None:
        if self._before(shard) is not None:
            self._counts["compared"] += shard.numel
        self._targets[shard.name, shard.start] = found.target
        self._counts["count"] += shard.numel
        self._add("undecided", found.sums)

    def add_curvature(self, curvature: Tensor | None, correction: float) -> None:
        """Account for elements of the running mean of H, which is to be divided by `correction`."""
        for run in runs(curvature) if curvature is not None else ():
            assert curvature is not None
            self._add("curvature", curvature[run].sum(dtype=torch.float64) / correction)
            self._add("negative", (curvature[run] < 0).sum(dtype=torch.float64))

    def report(self, with_curvature: bool) -> dict[str, float]:
        """Reduce over the ranks, read once, start anew. Collective."""
        table = self.matrices.table(0).new_tensor([list(self._counts.values())])
        sums = dict(zip(_SUMS, self.matrices.reduce(table + self._sums.to(table.device))[0].tolist(), strict=True))
        self._sums.zero_()
        self._counts = dict.fromkeys(_SUMS, 0.0)
        count = sums["count"]
        metrics = {"mask/undecided": sums["undecided"] / count, "mask/kept": sums["kept"] / count}
        if sums["groups"]:
            metrics["mask/disagreement"] = sums["disagreeing"] / sums["groups"]
        if sums["compared"]:
            metrics["mask/flip_rate"] = sums["flips"] / sums["compared"]
        if with_curvature:
            metrics["curvature/mean"] = sums["curvature"] / count
            metrics["curvature/negative_share"] = sums["negative"] / count
            if sums["sample_square"] > 0 and sums["average_square"] > 0:
                metrics["curvature/signal"] = sums["agreement"] / math.sqrt(
                    sums["sample_square"] * sums["average_square"]
                )
        return metrics


def histogram_counts(mask: Tensor, curvature: Tensor | None, bins: int) -> Tensor:
    """(2 * bins,) fp64 counts of one shard: its mask over [0, 1], and log10 |H| over CURVATURE_DECADES."""
    counts = torch.zeros(2 * bins, dtype=torch.float64, device=mask.device)
    counts[:bins] = torch.histc(mask, bins, 0.0, 1.0)
    if curvature is not None:
        low, high = CURVATURE_DECADES
        decades = curvature.abs().clamp(min=10.0**low).log10().clamp(low, high)
        counts[bins:] = torch.histc(decades, bins, low, high)
    return counts
