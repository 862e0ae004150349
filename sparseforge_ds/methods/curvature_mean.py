"""The running mean of the curvature (design eq. 2): what is measured, when, and how a sample enters the mean.

A sample comes from passes of its own (`refresh`), or was heard in a training step (`listen`, `take_heard`). Numbers of
it stay on the device until scores are made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.curvature import (
    Diagonal,
    Estimator,
    EstimatorContext,
    FisherSums,
    RunningSums,
    SumsEstimator,
    estimator_of,
    sums_of,
)
from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.mask.curvature import accumulate, token_rate
from sparseforge_ds.mask.factored import rank_one
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.methods.sharded_weights import ForgeError, ShardedWeights
from sparseforge_ds.model.measurable import refuse_unmeasurable
from sparseforge_ds.model.shared_weights import refuse_shared
from sparseforge_ds.zero.probe import Closure, Probe, ProbeBatches, batches_of
from sparseforge_ds.zero.shard import Shard

_LOG = logging.getLogger(__name__)
NO_GRADIENT = (
    "The loss has no gradient at any of them, as the divergence of a model from itself has none; measure the task loss "
    '("curvature": {"source": "probe"}), give another teacher, or use importance "magnitude"'
)


class CurvatureMean:
    """Of every prunable weight, by elements or by the row and column sums of its matrices; of none where scores need
    none."""

    def __init__(self, weights: ShardedWeights, probe: Probe) -> None:
        """Build the estimator that the config names. Raises ValueError where it cannot work on some prunable weight."""
        self.on = weights
        self.probe = probe
        self.lost_refreshes = 0
        """Refreshes that overflowed in fp16 since this object was made; the masks then move by the older curvature."""
        self.estimator: Estimator | None = None
        """Of elements, which are optimizer state."""
        self.sums: SumsEstimator | None = None
        self.running: RunningSums | None = None
        """What is kept where scores are made of sums."""
        self._hearing = ExitStack()
        self._hears = False
        self._noted_without_gradient = False
        config, on = weights.config, weights
        self.unheard = torch.zeros(len(on.matrices.names), dtype=torch.bool, device=on.layout.device)
        """Matrices whose layers had no token in some refresh, experts aside: for `Ranking` to stop at."""
        self.without_gradient = False
        """Return whether the loss had no gradient at any matrix in the steps that the newest scores are made of."""
        if config.keeps_curvature:
            module = on.engine.module
            refuse_unmeasurable(module, on.weights.values(), config)
            if config.importance == "wanda":
                refuse_shared(module, on.weights.values(), "be measured", '"importance": "magnitude"')
            elif config.curvature.per_token:
                refuse_shared(module, on.weights.values(), "be measured", '"curvature": {"per_token": false}')
            layers = {weight.name: module.get_submodule(weight.module) for weight in on.weights.values()}
            linear = {name: layer for name, layer in layers.items() if isinstance(layer, (nn.Linear, Conv1D))}
            fused = {w.module: module.get_submodule(w.module) for w in on.routed if len(w.shape) == 3}
            input_first = {weight.name for weight in on.weights.values() if weight.input_axis == -2}
            self.shards = EstimatorContext(probe, on.matrices, on.halo, linear, on.load, fused, input_first)
            if config.keeps_sums:
                self.sums = sums_of(self.shards, config)
                self.running = RunningSums(on.matrices, on.shards)
            else:
                self.estimator = estimator_of(self.shards, config)

    @property
    def measures(self) -> bool:
        """Whether scores need a curvature."""
        return self.estimator is not None or self.sums is not None

    @property
    def ready(self) -> bool:
        """Whether there is something to score by."""
        return not self.measures or self.on.refreshes > 0

    def note_without_gradient(self) -> None:
        """Say once that masks move without a curvature so far."""
        if not self._noted_without_gradient and self.on.layout.rank == 0:
            _LOG.warning(
                "the loss had no gradient up to step %d, as the divergence of a model from itself has none: masks move "
                "by the size of the weights until it has one",
                self.on.step,
            )
        self._noted_without_gradient = True

    def require_refreshed(self) -> None:
        """Raise ForgeError, before a mask is frozen and at the end of a run, if it was formed without a curvature."""
        if self.without_gradient:
            step = self.on.step
            raise ForgeError(f"masks were moved by the size of the weights alone up to step {step}. {NO_GRADIENT}")
        if not self.ready:
            names = list(self.on.weights)
            raise ForgeError(
                f"the curvature of {names[0]} and {len(names) - 1} others was never refreshed by step {self.on.step}: "
                "none was due, or every probe overflowed; use bf16, or lower fp16.initial_scale_power or "
                "method.update_every"
            )

    # -- in the training step -----------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Hear the passes of the next training step if its mask update reads them, else none. What was heard and not
        taken, as of a step that overflowed, is forgotten."""
        self._hearing.close()
        self._hears = self.on.config.measures_in_step(self.on.step + 1)
        if self._hears:
            assert isinstance(self.sums, FisherSums)
            self.sums.begin()
            self._hearing.enter_context(self.sums.listening())

    def loss_divided_by(self, divisor: float, tokens: float) -> None:
        """What the losses of this step divide sums over tokens by, and how many tokens each micro-batch counts for."""
        if self._hears:
            assert isinstance(self.sums, FisherSums)
            self.sums.divisor, self.sums.counted = divisor, tokens

    @torch.no_grad()
    def take_heard(self) -> None:
        """After a training step: take what was heard of it into the running mean, as one refresh. Collective."""
        self._hearing.close()
        if self._hears:
            self._take_sums()

    # -- in passes of its own -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh(self, probe: Closure | ProbeBatches | None, write_masters: Callable[[], None]) -> None:
        """Take a new sample into the running mean, unless training steps have given it. Collective. `write_masters`
        undoes what an estimator did to the masters."""
        on, part = self.on, self.on.config.curvature
        if not self.measures or on.config.from_training_step:
            return
        if probe is None:
            raise ValueError(
                f'importance "{on.config.importance}" is measured in passes of its own here: '
                "call forge.step(probe=lambda: engine(**batch).loss)"
            )
        batches = batches_of(probe)
        probes = part.probes if on.refreshes else part.first_probes
        # The first sample of elements is formed in the place of the mean, which is 0.
        averages = {} if self.estimator is None else {name: on.of(s, "curvature") for name, s in on.shards.items()}
        sample = averages if not on.refreshes or self.estimator is None else self.shards.zeros()
        with torch.enable_grad():
            if self.estimator is not None:
                applied = self.estimator.refresh(batches, on.step, probes, sample, write_masters)
            else:
                assert self.sums is not None
                applied = self.sums.refresh(batches, on.step, probes)
        if not applied:  # keep the mean as it is
            self.lost_refreshes += 1
            if sample is averages:
                for average in averages.values():
                    average.zero_()
        elif self.sums is not None:
            self._take_sums()
        else:
            self._take_elements(averages, None if sample is averages else sample)

    def _take_sums(self) -> None:
        on = self.on
        assert self.sums is not None and self.running is not None
        sums, counts = self.sums.finish()
        self.unheard |= (counts == 0) & ~on.load.is_expert
        rates = on.load.fade(self._rate)
        self.running.take(sums, counts, on.load.spread(rates, 1 - on.config.curvature.decay))
        on.refreshes += 1

    def _rate(self, tokens: Tensor, recent: Tensor) -> tuple[Tensor, Tensor]:
        return token_rate(tokens, recent, self.on.config.curvature.decay)

    def _take_elements(self, averages: Diagonal, sample: Diagonal | None) -> None:
        """Without a sample, the means are it."""
        on, decay = self.on, self.on.config.curvature.decay
        rates: list[float] = on.load.fade(self._rate).tolist() if on.load.names else []
        for name, average in averages.items():
            if name in on.load.rows:
                self._take_experts(name, average, None if sample is None else sample[name], rates)
            elif sample is not None:
                on.health.add_refresh(average, sample[name])
                accumulate(average, sample[name], decay)
            else:
                for chunk in chunks(average):
                    first = average[chunk].clone()
                    average[chunk].zero_()
                    accumulate(average[chunk], first, decay)
        on.refreshes += 1

    def _take_experts(self, name: str, average: Tensor, sample: Tensor | None, rates: list[float]) -> None:
        """Average by tokens; an expert that saw none keeps what it has."""
        for part in self.on.matrices.slices[name]:
            row = self.on.load.of_matrix[part.row]
            assert row is not None
            inside = slice(part.start, part.stop)
            if sample is not None and rates[row]:
                self.on.health.add_refresh(average[inside], sample[inside])
                average[inside].lerp_(sample[inside], rates[row])
            elif sample is None and not rates[row]:  # else 1: the first mean is the sample
                average[inside].zero_()

    # -- in a checkpoint ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is no state of an element; plain JSON types. Collective."""
        experts = {"experts": self.on.load.state_dict()} if self.on.load.names else {}
        return experts if self.running is None else {**experts, "curvature_sums": self.running.state_dict()}

    def check(self, state: dict[str, Any]) -> None:
        """Whether a saved state is of these weights."""
        if self.on.load.names:
            self.on.load.check(state.get("experts"))
        if self.running is not None:
            self.running.check(state.get("curvature_sums"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state that `check` found good."""
        if self.on.load.names:
            self.on.load.load_state_dict(state["experts"])
        if self.running is not None:
            self.running.load_state_dict(state["curvature_sums"])

    # -- what is known ------------------------------------------------------------------------------------------------

    def whole(self) -> AxisSums | None:
        """Row and column sums of every matrix where scores take them. Collective."""
        on = self.on
        if self.running is not None:
            return self.running.whole()
        if not on.config.factored:
            return None
        sums = AxisSums(on.matrices, on.shards, on.layout.flats[0].device)
        sums.add_shards(lambda shard: on.of(shard, "curvature"))
        return sums

    def chunks(self) -> Iterator[tuple[Shard, Tensor | None]]:
        """(chunk, mean of its elements, without bias correction) for every chunk of this rank's shards.

        None where there is none, as of elements after the freeze. Of sums, it is the product that scores take.
        Collective, before the first.
        """
        on = self.on
        sums = self.whole() if self.running is not None else None
        factors = [] if sums is None else sums.factors(on.layout.flats[0].device)
        for chunk in on.chunks():
            if sums is None:
                yield chunk, None if self.estimator is None or on.state.released else on.of(chunk, "curvature")
                continue
            shard, found = on.shards[chunk.name], []
            for part in on.matrices.slices[chunk.name]:
                start = max(part.start, chunk.start - shard.start)
                stop = min(part.stop, chunk.stop - shard.start)
                if start < stop:
                    first = sums.first(chunk.name, part) - part.start
                    found.append(rank_one(*factors[part.row], first + start, first + stop))
            yield chunk, torch.cat(found)
