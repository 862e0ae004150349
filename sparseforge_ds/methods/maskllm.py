"""MaskLLM: frozen weights, and a learned categorical over the patterns of every group (arXiv 2409.17481).

The network sees m W, where m is a soft sample that is drawn anew for every optimizer step. The gradient of the mask is
dL/dw * W, which is on the shard; ranks exchange it, and the logits, of groups that a shard boundary cuts. Adam's
settings are those of the engine's optimizer, its learning rate is that of the run.

Legend of shape suffixes: G groups, M members of a group, K patterns of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config.methods import logit_keys
from sparseforge_ds.curvature.ranking import Ranking
from sparseforge_ds.mask.anneal import progress
from sparseforge_ds.mask.kernels.publication import publish
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.random_numbers import counter_key
from sparseforge_ds.mask.sampling import choice, first_logits, gumbel, logit_gradient, normal, patterns
from sparseforge_ds.methods.starting_mask import StartingMask
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.extra_passes import Closure, ProbeBatches
from sparseforge_ds.zero.halo import Halo
from sparseforge_ds.zero.shard import Shard


class MaskLLM(StartingMask):
    """Method that learns where to prune; W and all other weights stay what they are."""

    trains_the_rest = False

    def __init__(self, weights: ShardedWeights, ranking: Ranking) -> None:
        super().__init__(weights, ranking)
        weights.require_adam("maskllm")
        assert weights.config.method.name == "maskllm" and isinstance(weights.pattern, NM)
        self.settings = weights.config.method
        self.needs_republish = False
        self.kept_count = weights.pattern.n
        self.members = weights.pattern.m
        self.patterns = math.comb(self.members, self.kept_count)
        self._pattern_KM = patterns(self.kept_count, self.members).to(weights.layout.flats[0].device)
        keys = logit_keys(self.kept_count, self.members)
        planes = len(keys) // 3
        self._keys = {"logit": keys[:planes], "first": keys[planes : 2 * planes], "second": keys[2 * planes :]}
        self._halo: dict[int, list[Halo]] = {}

    # -- the method ---------------------------------------------------------------------------------------------------

    @override
    def start(self) -> None:
        """Choose the mask that the logits lean to, and draw the first sample."""
        super().start()
        weights = self.weights
        halo = weights.exchange("mask")
        for shard in weights.chunks():
            mask_GM = weights.to_groups(shard, weights.state.mask(shard), halo)
            key = counter_key(weights.config.seed, 0, 0, f"logits/{shard.name}")
            noise_GK = normal(key, self._first(shard), mask_GM.shape[0], self.patterns, mask_GM.device)
            self._write(
                shard,
                "logit",
                first_logits(noise_GK, mask_GM, self.kept_count, self.settings.spread, self.settings.prior),
            )
        self.resume()
        for index in weights.state.shards_in:
            self._sample(index, 0)

    @override
    def resume(self) -> None:
        """Fetch the logits of cut groups; a frozen mask has none any more."""
        released = self.weights.state.released
        self._halo = {} if released else {index: self._exchange(index) for index in self.weights.state.shards_in}

    @override
    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """Return metrics where they are due; the masks have moved in the optimizer's step."""
        if not self.weights.schedule.is_update(step) and not self.weights.schedule.is_projection(step):
            return None
        for shard in self.weights.chunks():
            self.weights.add_update(shard, self.weights.state.mask(shard), self._best(shard).bool())
        return self.ranking.report()

    @override
    def publish_hard(self, index: int, dense: Tensor, out: Tensor) -> None:
        if self.weights.state.released:
            super().publish_hard(index, dense, out)
            return
        for shard in self._chunks(index):
            publish(shard.slice_of_flat(dense), self._best(shard), shard.slice_of_flat(out))

    @override
    def before_step(self, index: int, gradient: Tensor, param_group: dict[str, Any]) -> Tensor | None:
        """Take a step of Adam on the logits, and leave the weights alone."""
        weights = self.weights
        if weights.step >= weights.schedule.freeze_step:
            return None
        # torch's Adam loads no state without a step count.
        weights.state.partition(index)["step"] = torch.tensor(weights.step + 1.0)
        scale, temperature = self._dials(weights.step)
        reward = self.settings.reward * (1 - progress(weights.step, (0, weights.schedule.freeze_step)))

        # The chain rule at the mask: W times its gradient, less the reward of large weights that are kept.
        def of_mask(shard: Shard) -> Tensor:
            dense = weights.dense(shard)
            return dense * (shard.slice_of_flat(gradient) - 2 * reward * dense * weights.state.mask(shard))

        # Complete cut groups, and move the logits of every group along its gradient.
        halo = weights.halo.exchange(of_mask, self._names(index))
        for shard in self._chunks(index):
            grad_GM = weights.to_groups(shard, of_mask(shard), halo)
            choice_GK = choice(self._logits(shard), self._noise(shard, weights.step), scale, temperature)
            self._adam(shard, logit_gradient(choice_GK, grad_GM, self._pattern_KM, scale, temperature), param_group)
        return None

    @override
    def after_step(self, index: int, param_group: dict[str, Any]) -> None:
        """Draw the mask of the next forward."""
        if self.weights.step < self.weights.schedule.freeze_step:
            self._halo[index] = self._exchange(index)
            self._sample(index, self.weights.step + 1)

    # -- logits -------------------------------------------------------------------------------------------------------

    def _dials(self, step: int) -> tuple[float, float]:
        """Return kappa and tau."""
        share = progress(step, (0, self.weights.schedule.freeze_step))
        scale, temperature = (a + (b - a) * share for a, b in (self.settings.scale, self.settings.temperature))
        return scale, temperature

    def _names(self, index: int) -> list[str]:
        """Return the weights of a master partition, also those of which this rank has no element."""
        return [shard.name for shard in self.weights.layout.shards_in[index]]

    def _chunks(self, index: int) -> Iterator[Shard]:
        """Yield the shards of a master partition, a bounded chunk at a time."""
        return self.weights.chunks(self._names(index))

    def _first(self, shard: Shard) -> int:
        """Return the number of the first group that the shard has a member of, counted through the weight."""
        return self.weights.halo.span_with_halo(shard).start // self.members

    def _noise(self, shard: Shard, step: int) -> Tensor:
        """Return (G, K) noise of the sample that the forward after `step` optimizer steps sees."""
        key = counter_key(self.weights.config.seed, step, 0, f"gumbel/{shard.name}")
        span = self.weights.halo.span_with_halo(shard)
        device = self.weights.dense(shard).device
        return gumbel(key, self._first(shard), (span.stop - span.start) // self.members, self.patterns, device)

    def _exchange(self, index: int) -> list[Halo]:
        """Fetch what cut groups lack of the logits. Collective."""
        return [self.weights.exchange(key, self._names(index)) for key in self._keys["logit"]]

    def _logits(self, shard: Shard) -> Tensor:
        """Return (G, K) logits."""
        planes = zip(self._keys["logit"], self._halo[shard.flat], strict=True)
        parts = [self.weights.to_groups(shard, self.weights.state_view(shard, key), halo) for key, halo in planes]
        return torch.cat(parts, dim=1)[:, : self.patterns]

    def _write(self, shard: Shard, kind: str, value_GK: Tensor) -> None:
        """Store what belongs to the shard's own members."""
        for key, plane in zip(self._keys[kind], self._planes(shard, value_GK), strict=True):
            self.weights.state_view(shard, key).copy_(plane)

    def _planes(self, shard: Shard, value_GK: Tensor) -> list[Tensor]:
        """Turn (G, K) into (numel of the shard,) for every plane; 0 where there is no pattern."""
        slots = len(self._keys["logit"]) * self.members
        padded = torch.nn.functional.pad(value_GK, (0, slots - self.patterns))
        return [self.weights.from_groups(shard, plane.contiguous()) for plane in padded.split(self.members, dim=1)]

    def _adam(self, shard: Shard, grad_GK: Tensor, param_group: dict[str, Any]) -> None:
        beta1, beta2 = param_group["betas"]
        count = self.next_step
        rate = param_group["lr"] / (1 - beta1**count)
        for plane, grad in enumerate(self._planes(shard, grad_GK)):
            logit, first, second = (self.weights.state_view(shard, self._keys[kind][plane]) for kind in self._keys)
            first.lerp_(grad, 1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            divisor = second.sqrt().div_(math.sqrt(1 - beta2**count)).add_(param_group["eps"])
            logit.addcdiv_(first, divisor, value=-rate)

    @torch.no_grad()
    def _sample(self, index: int, step: int) -> None:
        """Write the mask that is seen after `step` optimizer steps: a sample, or the likeliest pattern once frozen."""
        weights = self.weights
        frozen = step >= weights.schedule.freeze_step
        scale, temperature = self._dials(step)
        for shard in self._chunks(index):
            if frozen:
                mask = self._best(shard)
            else:
                choice_GK = choice(self._logits(shard), self._noise(shard, step), scale, temperature)
                mask = weights.from_groups(shard, choice_GK @ self._pattern_KM)
            weights.state.write_mask(shard, mask)

    def _best(self, shard: Shard) -> Tensor:
        """Return (numel of the shard,) fp32: the likeliest pattern of every group."""
        return self.weights.from_groups(shard, self._pattern_KM[self._logits(shard).argmax(dim=1)])
