"""Metrics of masks for TensorBoard: sums over this rank's shards, and one reduction.

mask/undecided            mean m (1 - m): 0 once every value is 0 or 1 (the paper's L_mid)
mask/kept                 mean m
mask/flip_rate            share of weights whose place in the target changed since the last update
mask/disagreement         share of groups whose top N is not the paper's 1[m > theta]; of soft masks
curvature/mean            bias-corrected mean of H
curvature/negative_share  share of weights with H < 0; of row and column sums where these are kept
curvature/signal          cosine between the newest sample and the running mean before it, of elements or of sums: 0 is
                          pure noise
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from sparseforge_ds.mask.kernels.bits import octets
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.fused_update import mask_stats
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.zero.matrices import Matrices
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


class MaskMetrics:
    """Collects the sums of one mask update, and remembers the target bits of the last (1/8 byte a weight)."""

    def __init__(self, matrices: Matrices, pattern: Pattern) -> None:
        self.matrices = matrices
        self.pattern = pattern
        self._counts = dict.fromkeys(_SUMS, 0.0)
        """Sums that are known on the host."""
        self._sums: dict[str, list[Tensor]] = {}
        """() fp64 parts of each sum on a device; a report adds all of them up in one kernel."""
        self.targets: dict[tuple[str, int], Tensor] = {}
        """Packed targets of the last update, by the name and start of a chunk."""
        self._target_bits: dict[int, Tensor] = {}
        """Targets of whole partitions, of which some of `targets` are views."""

    def _add(self, name: str, value: Tensor) -> None:
        self._sums.setdefault(name, []).append(value)

    def forget(self) -> None:
        """Forget the last targets, and sums of an update that broke off; a loaded checkpoint has neither.

        The next update reports no flip rate.
        """
        self.targets.clear()
        self._target_bits.clear()
        self._reset_sums()

    def _reset_sums(self) -> None:
        self._sums.clear()
        self._counts = dict.fromkeys(_SUMS, 0.0)

    def has_target_bits(self, index: int) -> bool:
        """Return True if `target_bits` of a partition hold the targets of the last update."""
        return index in self._target_bits

    def target_bits(self, index: int, kept: Tensor, tiled_chunks: Iterable[Shard]) -> Tensor:
        """Return the packed targets of a partition, which an update of tiles reads and overwrites.

        Args:
            index: the partition.
            kept: (ceil(n / 8),) packed bits of the partition, whose shape is taken.
            tiled_chunks: chunks of the partition's shards that are in tiles, each of whole bytes.
        """
        if index not in self._target_bits:
            bits = self._target_bits[index] = torch.zeros_like(kept)
            for chunk in tiled_chunks:
                bytes_of_chunk = octets(slice(chunk.offset, chunk.offset + chunk.numel))
                self.targets[chunk.name, chunk.start] = bits[bytes_of_chunk]
        return self._target_bits[index]

    def add_tiles(self, sums: Tensor, elements: int, are_compared: bool) -> None:
        """Account for the new masks of all tiles.

        Args:
            sums: (4,) fp64, see `mask.kernels.tiles.SUMS`.
            elements: number of elements in tiles.
            are_compared: True if there were targets of an earlier update.
        """
        for name, value in zip(("undecided", "kept", "flips", "disagreeing"), sums.unbind(), strict=True):
            if name != "flips" or are_compared:
                self._add(name, value)
        self._counts["count"] += elements
        self._counts["compared"] += elements if are_compared else 0
        self._counts["groups"] += elements // self.pattern.members

    def add_refresh(self, average: Tensor, sample: Tensor) -> None:
        """Account for one shard's new curvature sample, before it enters the running mean."""
        for chunk in chunks(sample):
            new = sample[chunk]
            old = average[chunk]
            self._add("agreement", (new * old).sum(dtype=torch.float64))
            self._add("sample_square", new.square().sum(dtype=torch.float64))
            self._add("average_square", old.square().sum(dtype=torch.float64))

    def add_update(
        self, shard: Shard, mask: Tensor, target: Tensor, kept: Tensor | None = None, kept_bits: Tensor | None = None
    ) -> None:
        """Account for the new mask of a shard or a chunk of one.

        Args:
            shard: the elements.
            mask: (numel,) fp32, codes or bool.
            target: (numel,) bool, see `MaskUpdate`.
            kept: (numel,) bool, see `MaskUpdate`.
            kept_bits: (ceil(numel / 8),) into which `kept` is packed, if given.
        """
        key = (shard.name, shard.start)
        before = self.targets.get(key)
        stats = mask_stats(mask, target, None if kept_bits is None else kept, before)
        self.targets[key] = stats.target
        if kept_bits is not None:
            assert stats.kept is not None
            kept_bits.copy_(stats.kept)
        for name, value in zip(("undecided", "kept", "flips"), stats.sums, strict=False):
            self._add(name, value)
        self._counts["count"] += shard.numel
        self._counts["compared"] += 0 if before is None else shard.numel

    def add_disagreement(self, weight: PrunableWeight, shard: Shard, disagrees: Tensor) -> None:
        """Account for the groups whose top N is not 1[m > theta].

        `disagrees` has all groups that the chunk has a member of, see `MaskUpdate`.
        """
        # Leave out groups that a shard boundary cuts: two ranks would count them.
        period = self.pattern.period(weight.shape, weight.input_axis)
        per_period = period // self.pattern.members
        uncut = disagrees.view(-1)[per_period * (shard.start % period > 0) :]
        uncut = uncut[: max(0, shard.stop // period - -(-shard.start // period)) * per_period]
        self._add("disagreeing", uncut.sum(dtype=torch.float64))
        self._counts["groups"] += uncut.numel()

    def add_curvature(self, curvature: Tensor, correction: float = 1.0) -> None:
        """Account for elements of the running mean of H, whose bias `correction` divides out."""
        for chunk in chunks(curvature):
            self._add("curvature", curvature[chunk].sum(dtype=torch.float64) / correction)
            self._add("negative", (curvature[chunk] < 0).sum(dtype=torch.float64))

    def report(self, with_curvature: bool) -> dict[str, float]:
        """Return the metrics over all ranks, and reset the sums. Collective."""
        device = self.matrices.layout.device
        # Sum over the weights of this rank, then over ranks: one row of numbers, one collective.
        table = torch.tensor(list(self._counts.values()), dtype=torch.float64).to(device)
        if self._sums:
            zero = next(iter(self._sums.values()))[0].new_zeros(())
            parts = [self._sums.get(name, [zero]) for name in _SUMS]
            totals = [part[0] if len(part) == 1 else torch.stack(part).sum() for part in parts]
            table += torch.stack(totals).to(device)
        sums = dict(zip(_SUMS, self.matrices.layout.sum_shards(table).tolist(), strict=True))
        self._reset_sums()
        # Turn sums into shares and means. A quotient that nothing was counted for is left out.
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
