"""Curvature estimators on shards, interchangeable behind one method: `refresh(closure, step, probes)` -> diagonal.

    hutchinson      v (H v) by a central gradient difference, two extra passes a probe          (the paper's, eq. 2)
    fisher          squared gradients of the training loss, per token where the layer is linear
    gauss_newton    the same with labels drawn from the model (Sophia's estimator, arXiv 2305.14342)
    wanda           mean squared input of each column (arXiv 2306.11695), forward only
    magnitude       none: the score is W^2

What is estimated always refers to the published weight, the only one that the loss depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.curvature import (
    counter_key,
    hutchinson_sample,
    rademacher,
    sample_labels,
    token_fisher,
)
from sparseforge_ds.zero.edges import Edges
from sparseforge_ds.zero.moments import Matrices
from sparseforge_ds.zero.probe import Closure, Probe, reduce_to_shard
from sparseforge_ds.zero.publish import Publication
from sparseforge_ds.zero.shard import Layout, Shard
from sparseforge_ds.zero.taps import captured_output, layer_inputs, token_gradients

Diagonal = dict[str, Tensor]
"""(numel of the shard,) fp32 by weight name."""

RADIUS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-1}
"""Step of the gradient difference relative to the weight's RMS: as small as the dtype's rounding allows."""


class Estimator(Protocol):
    """One way to estimate the diagonal."""

    def refresh(self, closure: Closure, step: int, probes: int) -> Diagonal | None:
        """Average `probes` probes; None when one overflowed in fp16 and nothing can be said. Collective."""


class Shards:
    """What every estimator needs to know of this rank."""

    def __init__(self, probe: Probe, matrices: Matrices, edges: Edges, modules: dict[str, nn.Module]) -> None:
        """`modules` holds the linear layer of each weight that has one, by weight name."""
        # GPT-2's Conv1D is the linear layer that is no nn.Linear, and stores its weight as (in, out).
        self.input_first = {name for name, module in modules.items() if not isinstance(module, nn.Linear)}
        self.probe = probe
        self.layout: Layout = probe.layout
        self.publication: Publication = probe.publication
        self.matrices = matrices
        self.ranges = edges.ranges
        self.modules = modules
        self.shards = edges.shards

    def zeros(self) -> Diagonal:
        """A diagonal of zeros, on the devices of the master partitions."""
        return {
            name: torch.zeros(shard.numel, dtype=torch.float32, device=self.layout.flats[shard.flat].device)
            for name, shard in self.shards.items()
        }

    def add_gradient(self, index: int, gradient: Tensor, names: set[str], add: Callable[[Shard, Tensor], None]) -> None:
        """Call add(shard, its gradient) for the shards of `names` in one master partition."""
        for name in names:
            shard = self.shards[name]
            if shard.flat == index:
                add(shard, shard.of(gradient).float())


class Hutchinson:
    """v (H v), by gradient differences (design 2.1)."""

    def __init__(self, shards: Shards, config: SparseForgeConfig) -> None:
        self.on = shards
        self.seed = config.seed
        dtype = next(iter(shards.layout.low_precision[name] for name in shards.shards)).dtype
        self.radius = config.curvature.radius or RADIUS[dtype]

    def refresh(self, closure: Closure, step: int, probes: int) -> Diagonal | None:
        """See `Estimator`; 2 * `probes` forward-backward passes."""
        on = self.on
        total = on.zeros()
        radii = self._radii()
        try:
            for probe in range(probes):
                keys = {name: counter_key(self.seed, step, probe, name) for name in on.shards}
                for side in (1.0, -1.0):
                    self._displace(keys, {name: side * radius for name, radius in radii.items()})
                    if not self._add_side(closure, keys, radii, side / probes, total):
                        return None
        finally:
            on.publication.write_masters()
            on.layout.push()
        return total

    def _displace(self, keys: dict[str, int], radii: dict[str, float]) -> None:
        """Let the next forward see w + r v."""
        on, layout = self.on, self.on.layout
        on.publication.write_masters()
        for name, shard in on.shards.items():
            master = layout.flats[shard.flat].data
            shard.of(master).add_(self._sign(keys[name], shard, master.device) * radii[name])
        layout.push()

    def _add_side(
        self, closure: Closure, keys: dict[str, int], radii: dict[str, float], factor: float, into: Diagonal
    ) -> bool:
        """Add one side of v (g(w + r v) - g(w - r v)) / 2r; False on an fp16 overflow."""

        def add(shard: Shard, gradient: Tensor) -> None:
            sign = self._sign(keys[shard.name], shard, gradient.device)
            into[shard.name].add_(hutchinson_sample(gradient, sign, radii[shard.name]), alpha=factor)

        names = set(self.on.shards)
        return self.on.probe.gradients(closure, lambda flat, g: self.on.add_gradient(flat, g, names, add))

    @staticmethod
    def _sign(key: int, shard: Shard, device: torch.device) -> Tensor:
        return rademacher(key, shard.start, shard.stop, device)

    def _radii(self) -> dict[str, float]:
        """r of each weight: the relative radius times the RMS of its published values."""
        on = self.on
        table = torch.zeros(len(on.shards), 2, dtype=torch.float64, device=on.layout.device)
        for row, shard in enumerate(on.shards.values()):
            values = shard.of(on.layout.flats[shard.flat].detach()).double()
            table[row, 0], table[row, 1] = values.square().sum(), values.numel()
        square, count = on.matrices.reduce(table).unbind(1)
        return dict(zip(on.shards, (self.radius * (square / count).sqrt()).tolist(), strict=True))


class SquaredGradients:
    """Fisher and Gauss-Newton: squared gradients, per token where the weight belongs to a linear layer."""

    def __init__(self, shards: Shards, config: SparseForgeConfig) -> None:
        self.on = shards
        self.seed = config.seed
        self.modules = shards.modules if config.curvature.per_token else {}
        self.per_batch = set(shards.shards) - set(self.modules)
        self.head: nn.Module | None = None
        if config.importance == "gauss_newton":
            model: Any = shards.layout.engine.module
            self.head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            if self.head is None:
                raise ValueError(
                    f'importance "gauss_newton" draws labels from the logits, but {type(model).__name__} names no '
                    'output embeddings (get_output_embeddings); use "fisher"'
                )

    def refresh(self, closure: Closure, step: int, probes: int) -> Diagonal | None:
        """See `Estimator`; `probes` forward-backward passes."""
        on, layout = self.on, self.on.layout
        total = on.zeros()

        def on_tokens(name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
            shard = on.shards[name]
            full = token_fisher(grad_TO, input_TI, on.probe.backward_scale)
            if name in on.input_first:
                full = full.t()
            mine = reduce_to_shard(layout, shard, on.ranges[name], full.reshape(-1))
            # The loss is a mean over this rank's T tokens: (T g)^2 summed over tokens, / T for the mean, / ranks.
            total[name].add_(mine.to(total[name].device), alpha=grad_TO.shape[0] / layout.world_size / probes)

        def add_square(shard: Shard, gradient: Tensor) -> None:
            total[shard.name].addcmul_(gradient, gradient, value=1 / probes)

        for probe in range(probes):
            with token_gradients(self.modules, on_tokens) if self.modules else nullcontext():
                applied = on.probe.gradients(
                    self._with_sampled_labels(closure, step, probe) if self.head is not None else closure,
                    lambda index, gradient: on.add_gradient(index, gradient, self.per_batch, add_square),
                )
            if not applied:
                return None
        return total

    def _with_sampled_labels(self, closure: Closure, step: int, probe: int) -> Closure:
        assert self.head is not None
        head, rank = self.head, self.on.layout.rank

        def sampled() -> Tensor:
            with captured_output(head) as outputs:
                closure()
            logits = outputs[-1].flatten(0, -2)
            key = counter_key(self.seed, step, probe, "labels")
            labels = sample_labels(logits, key, rank * logits.shape[0])
            return F.cross_entropy(logits.float(), labels)

        return sampled


class InputNorms:
    """Wanda's activation norms as a curvature: H_oi = mean x_i^2, so that H W^2 is Wanda's score squared."""

    def __init__(self, shards: Shards, config: SparseForgeConfig) -> None:
        self.on = shards
        if missing := sorted(set(shards.shards) - set(shards.modules)):
            raise ValueError(
                f'importance "wanda" needs a linear layer for every prunable weight, which {missing[0]} '
                f'({len(missing)} in all) has not; use "fisher"'
            )

    def refresh(self, closure: Closure, step: int, probes: int) -> Diagonal | None:
        """See `Estimator`; `probes` forward passes and one reduction of a vector per layer."""
        on, layout = self.on, self.on.layout
        sums: dict[str, Tensor] = {}

        def on_inputs(name: str, input_TI: Tensor) -> None:
            squares = F.pad(input_TI.float().square().sum(dim=0), (0, 1), value=input_TI.shape[0])
            sums[name] = sums[name] + squares if name in sums else squares

        with layer_inputs(on.modules, on_inputs):
            for _ in range(probes):
                on.probe.loss(closure)
        if unseen := sorted(set(on.modules) - set(sums)):
            raise ValueError(f"{unseen[0]}: its layer was not called by the probe, so it has no activation norm")
        vector = torch.cat([sums[name] for name in on.shards])
        dist.all_reduce(vector)
        reduced = vector.split([sums[name].numel() for name in on.shards])
        columns = {name: squares[:-1] / squares[-1] for name, squares in zip(on.shards, reduced, strict=True)}
        diagonal = {}
        for name, shard in on.shards.items():
            index = torch.arange(shard.start, shard.stop, device=vector.device)
            inputs = index // shard.shape[-1] if name in on.input_first else index % shard.shape[-1]
            diagonal[name] = columns[name][inputs].to(layout.flats[shard.flat].device)
        return diagonal


ESTIMATORS: dict[str, Callable[[Shards, SparseForgeConfig], Estimator] | None] = {
    "hutchinson": Hutchinson,
    "gauss_newton": SquaredGradients,
    "fisher": SquaredGradients,
    "wanda": InputNorms,
    "magnitude": None,
}
