"""Hutchinson's estimate of the diagonal of the Hessian, the paper's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.context import Diagonal, Estimator, EstimatorContext
from sparseforge_ds.mask.curvature import hutchinson_sample
from sparseforge_ds.mask.random_numbers import counter_key, rademacher
from sparseforge_ds.zero.extra_passes import Closure, ProbeBatches
from sparseforge_ds.zero.shard import Shard

RADIUS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-1}
"""Step of the gradient difference relative to the weight's RMS: as small as the dtype's rounding allows."""


class Hutchinson(Estimator):
    """v (H D v) / D with v at the weights and D their radii, by gradient differences (eq. 2)."""

    def __init__(self, context: EstimatorContext, config: SparseForgeConfig) -> None:
        self.context = context
        self.seed = config.seed
        self.radius = config.curvature.radius or RADIUS[context.layout.compute_dtype]

    @override
    def refresh(
        self, batches: ProbeBatches, step: int, probes: int, total: Diagonal, write_masters: Callable[[], None]
    ) -> bool:
        """Average the probes, each of two forward and backward passes for every pass of a batch."""
        context = self.context
        # Each probe moves the weights by +radius and -radius along one random sign vector (eq. 2).
        radii = self._radii()
        context.expert_load.begin()
        applied = self._add_probes(batches, step, probes, radii, total, write_masters)
        # Put the weights back. After an error no rank may wait here for the one that has it.
        write_masters()
        context.layout.push()
        if not (applied and context.extra_passes.usable(*total.values())):
            return False
        # Experts are divided by the tokens that they saw on all ranks.
        context.expert_load.agree()
        context.divide(total, context.expert_load.shares)
        return True

    def _add_probes(
        self,
        batches: ProbeBatches,
        step: int,
        probes: int,
        radii: dict[str, Tensor],
        total: Diagonal,
        write_masters: Callable[[], None],
    ) -> bool:
        """Add all probes to `total`, and leave the weights displaced; return False if one is not finite."""
        context = self.context
        for batch in range(probes):
            keys = {name: counter_key(self.seed, step, batch, name) for name in context.shards}
            passes = batches.passes(batch)
            for side in (1.0, -1.0):
                write_masters()
                self._displace(keys, {name: side * radius for name, radius in radii.items()})
                with context.counting() if side > 0 else nullcontext():
                    applied = self._add_side(passes, keys, radii, side / probes, total)
                if not applied:
                    return False
        return True

    def _displace(self, keys: dict[str, int], radii: dict[str, Tensor]) -> None:
        """Let the next forward see w + r v."""
        context = self.context
        layout = context.layout
        for name in context.shards:
            for chunk in context.chunks[name]:
                master = layout.master(chunk)
                master.add_(self._sign(keys[name], chunk, master.device) * radii[name])
        layout.push()

    def _add_side(
        self, passes: Sequence[Closure], keys: dict[str, int], radii: dict[str, Tensor], factor: float, into: Diagonal
    ) -> bool:
        """Add one side of v (g(w + r v) - g(w - r v)) / 2r; return False if it is not finite."""

        def add(shard: Shard, gradient: Tensor) -> None:
            for chunk in self.context.chunks[shard.name]:
                inside = slice(chunk.start - shard.start, chunk.stop - shard.start)
                sign = self._sign(keys[shard.name], chunk, gradient.device)
                sample = hutchinson_sample(gradient[inside], sign, radii[shard.name])
                into[shard.name][inside].add_(sample, alpha=factor)

        names = set(self.context.shards)
        return self.context.extra_passes.gradients(
            passes, lambda flat, g: self.context.add_gradient(flat, g, names, add)
        )

    @staticmethod
    def _sign(key: int, shard: Shard, device: torch.device) -> Tensor:
        return rademacher(key, shard.start, shard.stop, device)

    def _radii(self) -> dict[str, Tensor]:
        """Return () r of each weight: the relative radius times the RMS of its published values.

        For a weight of zeros it is the largest RMS of all.
        """
        context = self.context
        table = torch.zeros(len(context.shards), 2, dtype=torch.float64, device=context.layout.device)
        for row, shard in enumerate(context.shards.values()):
            values = context.layout.master(shard).double()
            table[row, 0] = values.square().sum()
            table[row, 1] = values.numel()
        square, count = context.matrices.layout.sum_shards(table).unbind(1)
        rms = (square / count).sqrt()
        # A matrix of zeros, as fresh blocks have it, is moved like the largest one.
        rms = torch.where(rms > 0, rms, rms.max())
        radii = (self.radius * rms).to(context.layout.flats[0].device)
        return dict(zip(context.shards, radii.unbind(0), strict=True))
