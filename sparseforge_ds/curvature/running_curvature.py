"""The running mean of the curvature (eq. 2): what is measured, when, and how a sample enters the mean.

A sample comes from passes of its own (`refresh`), or was measured in a training step (`listen`, `take_measured`). Its
numbers stay on the device until scores are made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.curvature.context import Diagonal, Estimator, EstimatorContext, SumsEstimator
from sparseforge_ds.curvature.expert_load import ExpertLoad
from sparseforge_ds.curvature.fisher_sums import FisherSums
from sparseforge_ds.curvature.hutchinson import Hutchinson
from sparseforge_ds.curvature.input_norms import InputNorms
from sparseforge_ds.curvature.output_hutchinson import OutputHutchinson
from sparseforge_ds.curvature.running_sums import RunningSums
from sparseforge_ds.curvature.squared_gradients import SquaredGradients
from sparseforge_ds.mask.curvature import accumulate, token_rate
from sparseforge_ds.mask.factored import rank_one
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.model.measurable import refuse_unmeasurable
from sparseforge_ds.model.shared_weights import refuse_shared
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.extra_passes import Closure, ExtraPasses, ProbeBatches, batches_of
from sparseforge_ds.zero.forge_error import ForgeError
from sparseforge_ds.zero.shard import Shard

_LOG = logging.getLogger(__name__)
ESTIMATORS: dict[str, Callable[[EstimatorContext, SparseForgeConfig], Estimator]] = {
    "hutchinson": Hutchinson,
    "fisher": SquaredGradients,
}
"""Estimators of elements, by importance."""
SUMS_ESTIMATORS: dict[str, Callable[[EstimatorContext, SparseForgeConfig], SumsEstimator]] = {
    "hutchinson": OutputHutchinson,
    "fisher": FisherSums,
    "wanda": InputNorms,
}
"""Estimators of row and column sums, by importance."""
NO_GRADIENT = (
    "The loss has no gradient at any of them, as the divergence of a model from itself has none; take more steps, "
    'measure the task loss ("curvature": {"source": "probe"}), give another teacher, or use importance "magnitude"'
)


class RunningCurvature:
    """Running mean of every prunable weight's curvature: by elements, or by row and column sums of its matrices.

    It measures nothing where scores need no curvature.
    """

    def __init__(self, weights: ShardedWeights, extra_passes: ExtraPasses) -> None:
        """Build the estimator that the config names. Raises ValueError where it cannot work on some prunable weight."""
        config = weights.config
        self.weights = weights
        self.extra_passes = extra_passes
        self.refreshes = 0
        """Samples taken so far, for the bias correction."""
        self.lost_refreshes = 0
        """Refreshes that were infinite or NaN since this object was made; masks then move by the older curvature."""
        # A magnitude needs no tokens, and counts none.
        routed = [w for w in weights.prunable.values() if w.experts and config.importance != "magnitude"]
        self.expert_load = ExpertLoad(weights.matrices, {w.name: (*w.first_expert, w.experts) for w in routed})
        self.estimator: Estimator | None = None
        """Estimator of elements, whose mean is optimizer state."""
        self.sums: SumsEstimator | None = None
        """Estimator of row and column sums, whose mean is `running`."""
        self.running: RunningSums | None = None
        self.unseen_matrices = torch.zeros(len(weights.matrices.names), dtype=torch.bool, device=weights.layout.device)
        """(matrices,) bool: True if a layer had no token in some refresh, experts aside; `Ranking` then raises."""
        self.without_gradient = False
        """True if the loss had no gradient at any matrix in the steps that the newest scores are made of."""
        self._hooks = ExitStack()
        self._listens = False
        self._is_closed = False
        self._noted_without_gradient = False
        self._noted_single_micro_batch = False
        if not config.keeps_curvature:
            return
        # Each weight must belong to a layer that can be measured, and to one alone.
        module = weights.engine.module
        refuse_unmeasurable(module, weights.prunable.values(), config)
        if config.importance != "hutchinson":
            refuse_shared(module, weights.prunable.values(), "be measured", '"importance": "magnitude"')
        elif config.curvature.per_token:
            refuse_shared(module, weights.prunable.values(), "be measured", '"curvature": {"per_token": false}')
        self.context = EstimatorContext(weights, extra_passes, self.expert_load)
        if config.keeps_sums:
            self.sums = SUMS_ESTIMATORS[config.importance](self.context, config)
            self.running = RunningSums(self.context.empty_sums)
        else:
            self.estimator = ESTIMATORS[config.importance](self.context, config)

    @property
    def is_needed(self) -> bool:
        """True if scores need a curvature."""
        return self.estimator is not None or self.sums is not None

    @property
    def has_sample(self) -> bool:
        """True if there is something to score by."""
        return not self.is_needed or self.refreshes > 0

    def correction(self, name: str) -> float:
        """Return the divisor of a weight's running mean that corrects its bias; means of experts have none."""
        return 1.0 if name in self.expert_load.rows else self.bias_correction

    @property
    def bias_correction(self) -> float:
        """`correction` of weights that every token passes."""
        return 1 - self.weights.config.curvature.decay ** max(self.refreshes, 1)

    def note_without_gradient(self) -> None:
        """Say once that masks move without a curvature so far."""
        if not self._noted_without_gradient and self.weights.layout.rank == 0:
            _LOG.warning(
                "the loss had no gradient up to step %d, as the divergence of a model from itself has none: masks move "
                "by the size of the weights until it has one",
                self.weights.step,
            )
        self._noted_without_gradient = True

    def _note_single_micro_batch(self, probes: int) -> None:
        """Say once that fewer batches are measured than the config asks for."""
        if probes > 1 and not self._noted_single_micro_batch and self.weights.layout.rank == 0:
            key = "probes" if self.refreshes else "first_probes"
            _LOG.warning(
                "curvature.%s = %d, but the probe is a function, so only one micro-batch is measured. Pass an object "
                "with `passes(n)` to measure more.",
                key,
                probes,
            )
        self._noted_single_micro_batch = True

    def require_refreshed(self) -> None:
        """Raise ForgeError, before a mask is frozen and at the end of a run, if it was formed without a curvature."""
        step = self.weights.step
        if self.without_gradient:
            raise ForgeError(f"masks were moved by the size of the weights alone up to step {step}. {NO_GRADIENT}")
        if not self.has_sample:
            names = list(self.weights.prunable)
            # In fp16 the loss scale is the likely cause, else what the probe computes.
            if self.weights.layout.compute_dtype == torch.float16:
                why = "every probe overflowed; use bf16, or lower fp16.initial_scale_power"
            else:
                why = "every probe was infinite or NaN; look at the loss that it returns, and at its batches"
            if self.weights.config.soft is not None:
                why = f"none was due, for which lower method.update_every, or {why}"
            raise ForgeError(
                f"the curvature of {names[0]} and {len(names) - 1} others was never refreshed by step {step}: {why}"
            )

    # -- in the training step -----------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Measure in the passes of the next training step if its mask update needs it, else in none.

        Measurements that were not taken, such as those of an overflowed step, are dropped.
        """
        self._hooks.close()
        self._listens = not self._is_closed and self.weights.config.measures_in_step(self.weights.step + 1)
        if self._listens:
            assert isinstance(self.sums, FisherSums)
            self.sums.begin()
            self._hooks.enter_context(self.sums.listening())

    def loss_divided_by(self, divisor: float, tokens: float) -> None:
        """Set the divisor of this step's sums over tokens, and the tokens that a micro-batch counts for."""
        if self._listens:
            assert isinstance(self.sums, FisherSums)
            self.sums.divisor = divisor
            self.sums.counted = tokens

    @torch.no_grad()
    def take_measured(self) -> None:
        """Take what a training step measured into the running mean, as one refresh. Collective."""
        self._hooks.close()
        if self._listens:
            self._take_sums()

    def close(self) -> None:
        """Measure in no training step any more."""
        self._hooks.close()
        self._listens = False
        self._is_closed = True

    def require_open(self) -> None:
        """Raise ForgeError after `close`, where a training step that is due should have been measured."""
        step = self.weights.step + 1
        if self._is_closed and self.weights.config.measures_in_step(step):
            raise ForgeError(
                f"forge.close was called before step {step}, so its curvature was not measured; call it after the last "
                "step"
            )

    # -- in passes of its own -----------------------------------------------------------------------------------------

    def require_probe(self, probe: Closure | ProbeBatches | None, call: str) -> None:
        """Raise ValueError if `refresh` would lack its probe; `call` is the method of the forge that takes it."""
        config = self.weights.config
        if probe is None and self.is_needed and not config.from_training_step:
            raise ValueError(
                f'importance "{config.importance}" is measured in passes of its own here: '
                f"call forge.{call}(probe=lambda: engine(**batch).loss)"
            )

    @torch.no_grad()
    def refresh(self, probe: Closure | ProbeBatches | None, write_masters: Callable[[], None]) -> None:
        """Take a new sample into the running mean, unless training steps have given it. Collective.

        Args:
            probe: the passes to measure in.
            write_masters: restores the masters to m_eff W after an estimator has changed them.
        """
        weights = self.weights
        settings = weights.config.curvature
        if not self.is_needed or weights.config.from_training_step:
            return
        self.require_probe(probe, "step" if weights.step else "start")
        assert probe is not None
        batches = batches_of(probe)
        probes = settings.probes if self.refreshes else settings.first_probes
        # Without random signs, a batch that repeats gives the same again.
        if getattr(batches, "repeats", False) and weights.config.importance in ("fisher", "wanda"):
            if callable(probe):
                self._note_single_micro_batch(probes)
            probes = 1
        if self.sums is not None:
            with torch.enable_grad():
                applied = self.sums.refresh(batches, weights.step, probes)
            if applied:
                self._take_sums()
            else:
                self.lost_refreshes += 1
            return
        assert self.estimator is not None
        averages = {name: weights.state_view(shard, "curvature") for name, shard in weights.shards.items()}
        # The first sample is formed in the place of the mean, which is 0.
        sample = self.context.zeros() if self.refreshes else averages
        with torch.enable_grad():
            applied = self.estimator.refresh(batches, weights.step, probes, sample, write_masters)
        if applied:
            self._take_elements(averages, sample if self.refreshes else None)
            return
        # Keep the mean as it is.
        self.lost_refreshes += 1
        if sample is averages:
            for average in averages.values():
                average.zero_()

    def _take_sums(self) -> None:
        assert self.sums is not None and self.running is not None
        sums, counts = self.sums.finish()
        self.unseen_matrices |= (counts == 0) & ~self.expert_load.is_expert
        rates = self.expert_load.fade(self._rate)
        self.running.take(sums, counts, self.expert_load.spread(rates, 1 - self.weights.config.curvature.decay))
        self.refreshes += 1

    def _rate(self, tokens: Tensor, recent: Tensor) -> tuple[Tensor, Tensor]:
        return token_rate(tokens, recent, self.weights.config.curvature.decay)

    def _take_elements(self, averages: Diagonal, sample: Diagonal | None) -> None:
        """Take a sample of elements. If `sample` is None, `averages` already holds the first one."""
        decay = self.weights.config.curvature.decay
        rates: list[float] = self.expert_load.fade(self._rate).tolist() if self.expert_load.names else []
        for name, average in averages.items():
            if name in self.expert_load.rows:
                self._take_experts(name, average, None if sample is None else sample[name], rates)
            elif sample is not None:
                self.weights.metrics.add_refresh(average, sample[name])
                accumulate(average, sample[name], decay)
            else:
                for chunk in chunks(average):
                    first = average[chunk].clone()
                    average[chunk].zero_()
                    accumulate(average[chunk], first, decay)
        self.refreshes += 1

    def _take_experts(self, name: str, average: Tensor, sample: Tensor | None, rates: list[float]) -> None:
        """Average by tokens; an expert that saw none keeps what it has."""
        for matrix_slice in self.weights.matrices.slices[name]:
            row = self.expert_load.of_matrix[matrix_slice.row]
            assert row is not None
            inside = matrix_slice.inside
            if sample is not None and rates[row]:
                self.weights.metrics.add_refresh(average[inside], sample[inside])
                average[inside].lerp_(sample[inside], rates[row])
            elif sample is None and not rates[row]:  # else the rate is 1, and the mean is the sample
                average[inside].zero_()

    # -- in a checkpoint ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is not per element, as plain JSON types. Collective."""
        names = self.weights.matrices.names
        unseen = [name for name, is_unseen in zip(names, self.unseen_matrices.tolist(), strict=True) if is_unseen]
        state: dict[str, Any] = {"without_gradient": self.without_gradient, "unseen": unseen}
        if self.expert_load.names:
            state["experts"] = self.expert_load.state_dict()
        return state if self.running is None else {**state, "curvature_sums": self.running.state_dict()}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ValueError where a saved state is not of these weights."""
        if self.expert_load.names:
            self.expert_load.check(state.get("experts"))
        if self.running is not None:
            self.running.check(state.get("curvature_sums"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state that `check` has passed."""
        self.refreshes = state["refreshes"]
        self.without_gradient = state.get("without_gradient") is True
        # Those of steps that are undone are forgotten, where a loop goes back.
        unseen = state.get("unseen")
        known = unseen if isinstance(unseen, list) else []
        self.unseen_matrices.copy_(torch.tensor([name in known for name in self.weights.matrices.names]))
        if self.expert_load.names:
            self.expert_load.load_state_dict(state["experts"])
        if self.running is not None:
            self.running.load_state_dict(state["curvature_sums"])

    # -- what is known ------------------------------------------------------------------------------------------------

    def gather(self) -> AxisSums | None:
        """Return row and column sums of every matrix, or None where scores take elements. Collective."""
        weights = self.weights
        if self.running is not None:
            return self.running.gather()
        if not weights.config.factored:
            return None
        sums = AxisSums(weights.matrices, weights.shards, weights.layout.flats[0].device)
        sums.add_shards(lambda shard: weights.state_view(shard, "curvature"))
        return sums

    def chunks(self) -> Iterator[tuple[Shard, Tensor | None]]:
        """Yield (chunk, mean of its elements, without bias correction) for every chunk of this rank's shards.

        The mean is None if no elements are kept, as after the freeze. From sums it is the product that scores use.
        Collective once, before the first.
        """
        weights = self.weights
        sums = self.gather() if self.running is not None else None
        factors = None if sums is None else sums.factors(weights.layout.flats[0].device)
        for chunk in weights.chunks():
            if sums is None or factors is None:
                has_elements = self.estimator is not None and not weights.state.released
                yield chunk, weights.state_view(chunk, "curvature") if has_elements else None
                continue
            slices = weights.matrices.slices_of(chunk)
            products = [
                rank_one(*factors.matrix_sums(part.row), part.first, part.first + part.numel) for part in slices
            ]
            yield chunk, torch.cat(products)
