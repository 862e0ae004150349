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

from sparseforge_ds.mask.bits import count_bits, pack
from sparseforge_ds.mask.pattern import Pattern, top_n
from sparseforge_ds.mask.quench import disagreement
from sparseforge_ds.mask.runs import runs
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.zero.moments import Matrices
from sparseforge_ds.zero.shard import Shard

_SUMS = (
    "count",
    "undecided",
    "kept",
    "flips",
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
        self._sums = self._zeros()
        self._targets: dict[tuple[str, int], Tensor] = {}

    def _zeros(self) -> Tensor:
        return torch.zeros(len(_SUMS), dtype=torch.float64, device=self.matrices.layout.device)

    def _add(self, name: str, value: Tensor | float) -> None:
        self._sums[_COLUMN[name]] += value.to(self._sums.device) if isinstance(value, Tensor) else value

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
        packed = pack(target)
        before = self._targets.get((shard.name, shard.start))
        if before is not None:
            self._add("flips", count_bits(packed ^ before))
            self._add("compared", shard.numel)
        self._targets[shard.name, shard.start] = packed
        self._add("count", shard.numel)
        for run in runs(mask):
            self._add("undecided", (mask[run] * (1 - mask[run])).sum(dtype=torch.float64))
            self._add("kept", mask[run].sum(dtype=torch.float64))
            if curvature is not None:
                self._add("curvature", curvature[run].sum(dtype=torch.float64) / correction)
                self._add("negative", (curvature[run] < 0).sum(dtype=torch.float64))
        span = self.pattern.span(weight.shape, weight.input_axis)
        # Groups that a shard boundary cuts are left out: this rank does not have all of their masks at hand.
        whole = mask[-shard.start % span : mask.numel() - shard.stop % span]
        if shard.start // span < shard.stop // span and whole.numel():
            group_GM = self.pattern.to_groups(whole, weight.shape, weight.input_axis)
            for run in runs(group_GM):
                self._add("disagreeing", disagreement(group_GM[run], top_n(group_GM[run], self.pattern.kept)))
            self._add("groups", group_GM.shape[0])

    def report(self, with_curvature: bool) -> dict[str, float]:
        """Reduce over the ranks, read once, start anew. Collective."""
        sums = dict(zip(_SUMS, self.matrices.reduce(self._sums[None])[0].tolist(), strict=True))
        self._sums = self._zeros()
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
