"""Quantization of masters (eq. 14) on this rank's shards, before DeepSpeed casts and gathers them.

Groups that share a scale are completed over shard boundaries as groups of the pattern are (`zero.halo`).
"""

from __future__ import annotations

import torch

from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.quantization import quantized
from sparseforge_ds.zero.halo import HaloExchange
from sparseforge_ds.zero.shard import Shard, ShardLayout


class QuantizedMasters:
    """Grid of the masters of prunable weights."""

    def __init__(
        self, layout: ShardLayout, shards: dict[str, Shard], groups: dict[str, NM], axes: dict[str, int], bits: int
    ) -> None:
        """Plan the exchange of cut groups. Collective.

        Args:
            layout: shard map of the engine.
            shards: shards of the prunable weights, by name.
            groups: inputs that share a scale, by weight name (`mask.quantization.scale_group`).
            axes: input axis of each weight.
            bits: of a code.
        """
        self._layout = layout
        self._groups = groups
        self._axes = axes
        self._bits = bits
        periods = {name: groups[name].period(shard.shape, axes[name]) for name, shard in shards.items()}
        self._halo = HaloExchange(layout, shards, periods)

    @torch.no_grad()
    def quantize(self, index: int) -> None:
        """Do w <- Q(w) for the masters of a partition. Collective if a group is cut on some rank."""
        names = [shard.name for shard in self._layout.shards_in[index]]
        halo = self._halo.exchange(lambda shard: self._layout.master(shard).float(), names)
        for chunk in (chunk for name in names for chunk in self._halo.chunks[name]):
            group = self._groups[chunk.name]
            axis = self._axes[chunk.name]
            master = self._layout.master(chunk)
            groups_with_halo = self._halo.with_halo(chunk, master.float(), halo)
            rounded_GI = quantized(group.to_groups(groups_with_halo, chunk.shape, axis), self._bits)
            rounded = group.from_groups(rounded_GI, chunk.shape, axis)
            master.copy_(self._halo.without_halo(chunk, rounded))
