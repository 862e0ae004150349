"""Squared gradients: the Fisher and the Gauss-Newton diagonal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.estimate.listed_experts import ListedExperts
from sparseforge_ds.estimate.shards import Diagonal, Shards, Take
from sparseforge_ds.mask.curvature import counter_key, expert_fisher, sample_labels, token_fisher
from sparseforge_ds.zero.expert_taps import expert_gradients
from sparseforge_ds.zero.probe import Closure, reduce_to_shard
from sparseforge_ds.zero.shard import Shard
from sparseforge_ds.zero.taps import captured_output, token_gradients


class SquaredGradients:
    """Fisher and Gauss-Newton: squared gradients, per token where the weight belongs to a linear layer."""

    def __init__(self, shards: Shards, config: SparseForgeConfig) -> None:
        self.on = shards
        self.seed = config.seed
        self.per_token = config.curvature.per_token
        self.modules = shards.modules if self.per_token else {}
        self.fused = shards.fused if self.per_token else {}
        self.listed = ListedExperts(shards) if self.per_token and shards.lists else None
        self.of_fused = {name for name in shards.load.rows if name not in shards.modules} if self.fused else set()
        self.per_batch = set(shards.shards) - set(self.modules) - self.of_fused
        self.head: nn.Module | None = None
        if config.importance == "gauss_newton":
            model: Any = shards.layout.engine.module
            self.head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            if self.head is None:
                raise ValueError(
                    f'importance "gauss_newton" draws labels from the logits, but {type(model).__name__} names no '
                    'output embeddings (get_output_embeddings); use "fisher"'
                )

    def streamed(self) -> set[str]:
        """See `Estimator`; fused experts, unless an overflow in fp16 may undo what was done."""
        lossy = any(weight.dtype == torch.float16 for weight in self.on.layout.low_precision.values())
        return set() if lossy else self.of_fused

    def refresh(self, closure: Closure, step: int, probes: int, total: Diagonal, take: Take | None = None) -> bool:
        """See `Estimator`; `probes` forward-backward passes."""
        on, layout = self.on, self.on.layout
        tokens_of: dict[str, list[int]] = {}

        def on_tokens(name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
            if self.listed is not None and name in on.load.rows:
                self.listed.add(name, grad_TO, input_TI)
                return
            shard = on.shards[name]
            full = token_fisher(grad_TO, input_TI, on.probe.backward_scale)
            if name in on.input_first:
                full = full.t()
            _, mine = reduce_to_shard(layout, shard, on.ranges[name], full.reshape(-1))
            # The loss is a mean over this rank's T tokens: (T g)^2 summed over tokens, / T for the mean, / ranks.
            total[name].add_(mine.to(total[name].device), alpha=grad_TO.shape[0] / layout.world_size / probes)

        def on_experts(
            layer: str, parameter: str, grad_SO: Tensor | None, input_SI: Tensor, stop_E: Tensor, tokens: int
        ) -> None:
            on.count(layer, parameter, stop_E)
            name = f"{layer}.{parameter}"
            if name not in on.shards:
                return
            assert grad_SO is not None
            if name not in total:
                if name in tokens_of:
                    raise ValueError(
                        f"{name}: its experts are called more than once in a probe, so their curvature cannot be taken "
                        'a part at a time; use "curvature": {"probes": 2}'
                    )
                tokens_of[name] = on.load.summed(stop_E)
            shard, size = on.shards[name], grad_SO.shape[1] * input_SI.shape[1]
            # As above, but / N for the mean, the tokens of an expert, which are known once all ranks were asked.
            for first, full in expert_fisher(grad_SO, input_SI, stop_E, on.probe.backward_scale / tokens):
                inside, mine = reduce_to_shard(layout, shard, on.ranges[name], full.view(-1), first * size)
                mine = mine.to(layout.flats[shard.flat].device)
                if name in total:
                    total[name][inside].add_(mine)
                else:
                    assert take is not None
                    take(name, inside.start, mine, tokens_of[name])
                del full, mine

        def add_square(shard: Shard, gradient: Tensor) -> None:
            total[shard.name].addcmul_(gradient, gradient, value=1 / probes)

        on.load.begin()
        for probe in range(probes):
            with (
                token_gradients(self.modules, on_tokens) if self.modules else nullcontext(),
                expert_gradients(self.fused, on_experts) if self.fused else nullcontext(),
                self.listed.collected(total) if self.listed is not None else nullcontext(),
                nullcontext() if self.per_token else on.counting(),
            ):
                applied = on.probe.gradients(
                    self._with_sampled_labels(closure, step, probe) if self.head is not None else closure,
                    lambda index, gradient: on.add_gradient(index, gradient, self.per_batch, add_square),
                )
            if not applied:
                return False
        on.load.agree()
        on.divide(total, [float(n) for n in on.load.refreshed] if self.per_token else on.load.shares)
        return True

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
