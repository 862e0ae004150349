"""Curvature estimators on shards, interchangeable behind one method: `refresh(closure, step, probes)` -> diagonal.

    hutchinson      v (H v) by a central gradient difference, two extra passes a probe          (the paper's, eq. 2)
    fisher          squared gradients of the training loss, per token where the layer is linear
    gauss_newton    the same with labels drawn from the model (Sophia's estimator, arXiv 2305.14342)
    wanda           mean squared input of each column (arXiv 2306.11695), forward only
    magnitude       none: the score is W^2

What is estimated always refers to the published weight, the only one that the loss depends on.

Of a routed expert it is the mean over the tokens that the expert saw, on all ranks; zero where it saw none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.curvature import (
    counter_key,
    expert_fisher,
    hutchinson_sample,
    rademacher,
    sample_labels,
    token_fisher,
)
from sparseforge_ds.zero.edges import Edges
from sparseforge_ds.zero.expert_load import ExpertLoad
from sparseforge_ds.zero.expert_taps import expert_gradients, expert_inputs, untappable
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

    def __init__(
        self,
        probe: Probe,
        matrices: Matrices,
        edges: Edges,
        modules: dict[str, nn.Module],
        load: ExpertLoad,
        fused: dict[str, nn.Module],
    ) -> None:
        """Collect them.

        Args:
            probe: of the engine.
            matrices: of all prunable weights.
            edges: of their shards.
            modules: the linear layer of each weight that has one, by weight name.
            load: token counts of the experts.
            fused: the modules that hold experts as three-dimensional weights, by module name.

        Raises:
            ValueError: the tokens of fused experts cannot be seen, because they are not those of transformers.
        """
        # GPT-2's Conv1D is the linear layer that is no nn.Linear, and stores its weight as (in, out).
        self.input_first = {name for name, module in modules.items() if not isinstance(module, nn.Linear)}
        self.probe = probe
        self.layout: Layout = probe.layout
        self.publication: Publication = probe.publication
        self.matrices = matrices
        self.ranges = edges.ranges
        self.modules = modules
        self.shards = edges.shards
        self.load = load
        self.fused = fused
        for name, module in fused.items():
            if (why := untappable(module)) is not None:
                raise ValueError(
                    f"{name}: {type(module).__name__} {why}, so the tokens of its experts cannot be counted; "
                    f'use "importance": "magnitude", or keep it dense with "exclude": ["{name}.*"]'
                )
        # One layer of each expert in a list counts for all of them.
        one: dict[int, str] = {}
        for name in load.rows:
            if name in modules:
                one.setdefault(load.rows[name].start, name)
        self.listed = {name: modules[name] for name in one.values()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of every expert in the backward passes inside; `ExpertLoad.agree` afterwards."""

        def fused(layer: str, parameter: str, _g: Tensor | None, _x: Tensor, stop_E: Tensor, _tokens: int) -> None:
            self.count(layer, parameter, stop_E)

        def listed(name: str, grad_TO: Tensor, _input: Tensor) -> None:
            self.load.add(self.load.rows[name], torch.tensor([float(grad_TO.shape[0])]))

        with ExitStack() as stack:
            if self.fused:
                stack.enter_context(expert_gradients(self.fused, fused))
            if self.listed:
                stack.enter_context(token_gradients(self.listed, listed))
            yield

    def count(self, layer: str, parameter: str, stop_E: Tensor) -> None:
        """Count the tokens of a layer's fused experts, once for both of their weights."""
        if parameter == "down_proj":
            self.load.add(self.load.layers[layer], stop_E.diff(prepend=stop_E.new_zeros(1)))

    def divide(self, diagonal: Diagonal, by: list[float]) -> None:
        """Divide what belongs to an expert by the number in its row; what belongs to none stays."""
        for name in self.load.rows:
            for part in self.matrices.parts[name]:
                row = self.load.of_matrix[part.row]
                assert row is not None
                if by[row]:
                    diagonal[name][part.start : part.stop] /= by[row]

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
        on.load.begin()
        try:
            for probe in range(probes):
                keys = {name: counter_key(self.seed, step, probe, name) for name in on.shards}
                for side in (1.0, -1.0):
                    self._displace(keys, {name: side * radius for name, radius in radii.items()})
                    with on.counting() if side > 0 else nullcontext():
                        applied = self._add_side(closure, keys, radii, side / probes, total)
                    if not applied:
                        return None
        finally:
            on.publication.write_masters()
            on.layout.push()
        on.load.agree()
        on.divide(total, on.load.shares)
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
        self.fused = shards.fused if config.curvature.per_token else {}
        if config.curvature.per_token and shards.listed:
            name = next(iter(shards.listed))
            raise ValueError(
                f'{name}: squared gradients per token (importance "{config.importance}") of experts in a list of '
                'modules are not supported; use "curvature": {"per_token": false}'
            )
        of_fused = {name for name in shards.load.rows if name not in shards.modules} if self.fused else set()
        self.per_batch = set(shards.shards) - set(self.modules) - of_fused
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

        def on_experts(
            layer: str, parameter: str, grad_SO: Tensor | None, input_SI: Tensor, stop_E: Tensor, tokens: int
        ) -> None:
            on.count(layer, parameter, stop_E)
            name = f"{layer}.{parameter}"
            if name in on.shards:
                assert grad_SO is not None
                # As above, but / N for the mean, the tokens of an expert, which are known at the end.
                full = expert_fisher(grad_SO, input_SI, stop_E, on.probe.backward_scale / tokens)
                mine = reduce_to_shard(layout, on.shards[name], on.ranges[name], full.view(-1))
                total[name].add_(mine.to(total[name].device))

        def add_square(shard: Shard, gradient: Tensor) -> None:
            total[shard.name].addcmul_(gradient, gradient, value=1 / probes)

        on.load.begin()
        for probe in range(probes):
            with (
                token_gradients(self.modules, on_tokens) if self.modules else nullcontext(),
                expert_gradients(self.fused, on_experts) if self.fused else on.counting(),
            ):
                applied = on.probe.gradients(
                    self._with_sampled_labels(closure, step, probe) if self.head is not None else closure,
                    lambda index, gradient: on.add_gradient(index, gradient, self.per_batch, add_square),
                )
            if not applied:
                return None
        on.load.agree()
        on.divide(total, [float(n) for n in on.load.refreshed] if self.fused else on.load.shares)
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
        if missing := sorted(set(shards.shards) - set(shards.modules) - set(shards.load.rows)):
            raise ValueError(
                f'importance "wanda" needs a linear layer for every prunable weight, which {missing[0]} '
                f'({len(missing)} in all) has not; use "fisher"'
            )

    def refresh(self, closure: Closure, step: int, probes: int) -> Diagonal | None:
        """See `Estimator`; `probes` forward passes and one reduction of a vector per layer."""
        on, layout = self.on, self.on.layout
        # (experts, in + 1): of each expert, or of all tokens, the sum of squares and the number of tokens.
        sums: dict[str, Tensor] = {}
        for name in on.load.rows:  # an expert in a list may not be called
            size = len(on.load.rows[name]), on.shards[name].shape[-1] + 1
            sums[name] = torch.zeros(size, device=layout.device)

        def on_inputs(name: str, input_TI: Tensor) -> None:
            squares = F.pad(input_TI.float().square().sum(dim=0), (0, 1), value=input_TI.shape[0])[None]
            sums[name] = sums[name] + squares if name in sums else squares

        def on_experts(
            layer: str, parameter: str, _g: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
        ) -> None:
            name = f"{layer}.{parameter}"
            if name in on.shards:
                square_SI = F.pad(input_SI.float().square(), (0, 1), value=1.0)
                runs = square_SI.tensor_split(stop_E[:-1].cpu().long())
                sums[name] += torch.stack([run.sum(dim=0) for run in runs])

        with (
            layer_inputs(on.modules, on_inputs),
            expert_inputs(on.fused, on_experts) if on.fused else nullcontext(),
        ):
            for _ in range(probes):
                on.probe.loss(closure)
        if unseen := sorted(set(on.modules) - set(sums)):
            raise ValueError(f"{unseen[0]}: its layer was not called by the probe, so it has no activation norm")
        vector = torch.cat([sums[name].view(-1) for name in on.shards])
        dist.all_reduce(vector)
        reduced = {
            name: part.view_as(sums[name])
            for name, part in zip(on.shards, vector.split([sums[name].numel() for name in on.shards]), strict=True)
        }
        on.load.take({name: reduced[name][:, -1].tolist() for name in on.load.rows})
        diagonal = {}
        for name, shard in on.shards.items():
            column_EI = reduced[name][:, :-1] / reduced[name][:, -1:].clamp(min=1)
            index = torch.arange(shard.start, shard.stop, device=vector.device)
            inputs = index // shard.shape[-1] if name in on.input_first else index % shard.shape[-1]
            if len(column_EI) > 1:
                expert = index // (shard.shape[-2] * shard.shape[-1])
                values = column_EI[expert, inputs]
            else:
                values = column_EI[0, inputs]
            diagonal[name] = values.to(layout.flats[shard.flat].device)
        return diagonal


ESTIMATORS: dict[str, Callable[[Shards, SparseForgeConfig], Estimator] | None] = {
    "hutchinson": Hutchinson,
    "gauss_newton": SquaredGradients,
    "fisher": SquaredGradients,
    "wanda": InputNorms,
    "magnitude": None,
}
