"""SparseForge on a DeepSpeed engine: attach, step, finish, save and restore. A method says what is done to a mask.

The default method is Algorithm 1 of the paper (arXiv 2605.06402); `methods` has it and the others.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch

from sparseforge_ds.branches.branch_start import move_into_branches, switch_on_branches
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.histograms import histograms
from sparseforge_ds.curvature.ranking import Ranking
from sparseforge_ds.curvature.running_curvature import RunningCurvature
from sparseforge_ds.mask.anneal import Dials, Schedule
from sparseforge_ds.methods import method_of
from sparseforge_ds.model.expert_modules import expert_lists, refuse_unprepared
from sparseforge_ds.model.families import Coverage, PrunableWeight, coverage
from sparseforge_ds.model.low_rank import require_prepared
from sparseforge_ds.saved_state import SavedState
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.engine_checkpoints import carry_state
from sparseforge_ds.zero.extra_passes import Closure, ExtraPasses, ProbeBatches
from sparseforge_ds.zero.forge_error import ForgeError
from sparseforge_ds.zero.refuse import refuse_unsupported
from sparseforge_ds.zero.step_hooks import StepHooks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

__all__ = ["ForgeError", "SparseForge"]

_LOG = logging.getLogger(__name__)


class SparseForge:
    """N:M masks on the weights of an engine. The method of the config moves them, and freezes them in the end.

    Call `step` after every `engine.step`. Masks and dense weights are state of the engine's optimizer, and so is a
    curvature by elements. This object holds the step count, row and column sums, and what can be recomputed.
    """

    def __init__(self, engine: DeepSpeedEngine, config: SparseForgeConfig, max_steps: int | None = None) -> None:
        """Attach to an engine. Collective; changes no weight, unless weights are quantized from the first step on.

        From now on `engine.save_checkpoint` saves the forge's state too, and `engine.load_checkpoint` continues the
        whole run as `restore` does.

        Args:
            engine: from `deepspeed.initialize` with `model_parameters=param_groups(model, config)`.
            config: the same as was given to `prepare` and `param_groups`.
            max_steps: optimizer steps of the whole run; None takes those of the config.

        Raises:
            ValueError: the engine or the model cannot be used, with the setting to change, or the engine has made steps
                or loaded a checkpoint.
        """
        # Refuse what cannot be trained before anything is attached.
        refuse_unsupported(engine)
        if engine.global_steps:
            raise ValueError(
                f"the engine is at step {engine.global_steps} already, and masks would begin anew: make sf.SparseForge "
                "before engine.load_checkpoint or accelerator.load_state; after a dense warm-up make a new engine"
            )
        refuse_unprepared(engine.module, expert_lists(engine.module))
        config = config if max_steps is None else dataclasses.replace(config, max_steps=max_steps)
        config.check_length()
        require_prepared(engine.module, config)
        self.engine = engine
        self.config = config
        self.schedule = config.resolved_schedule
        self.pattern = config.parsed_pattern
        self.metrics: dict[str, float] = {}
        """Numbers of the last mask update, reduced over all ranks."""
        self.sharded = ShardedWeights(engine, config)
        """This rank's shards of the weights under a mask, and their states."""
        self.weights: list[PrunableWeight] = list(self.sharded.prunable.values())
        self.coverage: Coverage = coverage(engine.module, self.weights)
        # Curvature, scores and method work on the shards; the hooks publish masks inside the optimizer's step.
        self._extra_passes = ExtraPasses(self.sharded.layout)
        self.curvature = RunningCurvature(self.sharded, self._extra_passes)
        """Running mean of the curvature, of which scores are made."""
        self._saved = SavedState(self.sharded, self.curvature)
        self.method = method_of(config)(self.sharded, Ranking(self.curvature))
        """The method of the config, on this rank's shards."""
        self.sharded.state.attach()
        self._hooks = StepHooks(self.sharded.state, self.method, self._extra_passes)
        engine.has_sparseforge = True  # its hooks stay: `refuse_unsupported` admits no second one
        # ZeRO-3's leaf modules reduce gradients of weights even in a probe of activations.
        has_leaves = getattr(self.sharded.layout.optimizer, "leaf_parameters", None)
        if self.curvature.estimator is not None or (self.needs_probe and has_leaves):
            self.sharded.require_gradients("a curvature that takes gradients of weights (curvature.factored, source)")
        self.ready = not self._needs_start
        """True if the first step may be made; otherwise call `start` first."""
        # From here on a checkpoint of the engine has the forge's state.
        self.method.resume()
        if self.ready and config.is_quantized(0):
            self._republish()
        self._call_in_progress: str | None = None
        """Name of a call that has begun to change weights or masks, until it is over."""
        self._skipped = engine.skipped_steps
        self._micro_steps = engine.micro_steps
        """The engine's count of its `step` calls, as the newest call of `step` here found it."""
        carry_state(self.sharded.layout, self.state_dict, self.restore, self.require_finite)
        self.sharded.warn_of_slow_weights()  # TRL's on-policy trainers have a default of 1e-6
        self._listen()

    @property
    def step_count(self) -> int:
        """Optimizer steps that were applied."""
        return self.sharded.step

    @property
    def needs_probe(self) -> bool:
        """True if `start` or `step` take passes of their own, and so need a probe."""
        return (self.curvature.is_needed and not self.config.from_training_step) or self.config.starts_by_block

    # -- what a training loop calls -----------------------------------------------------------------------------------

    def start(self, probe: Closure | ProbeBatches | None = None) -> None:
        """Make a fresh run ready: shift weights into branches, then choose masks or train blocks, as the config asks.

        After an error of the probe it may be called again, except with a shift or a curvature by elements.

        Args:
            probe: as in `step`; needed for a block-wise start, and for a starting mask by another importance than
                `magnitude`.

        Raises:
            ValueError: a probe is needed, and there is none, or blocks would be trained on one micro-batch alone.
                Nothing has changed then.
        """
        if self.ready or self.step_count:
            return
        self._require_finished()
        self.method.require_start_probe(probe)
        # Measure before anything changes, so that a start whose probe fails can be called again. The probe must see
        # shifted weights, and an estimate of elements displaces weights while it is made.
        if self.config.moves_weights_into_branches or self.curvature.estimator is not None:
            self._call_in_progress = "forge.start"
        if self.config.moves_weights_into_branches:
            move_into_branches(self.engine.module, self.sharded)
            self._republish()
        self.method.measure_start(probe)
        self._call_in_progress = "forge.start"
        self.method.start()
        self.ready = True
        self._switch_on_branches(0)
        self._republish()
        self._release_if_due()
        self._call_in_progress = None

    def loss_divided_by(self, divisor: float, micro_batches: int | None = None) -> None:
        """Set the divisor of a loss that is not the mean over all tokens of its micro-batch, before its backward pass.

        A loss with padding or labels of -100 is no such mean. The divisor lets the curvature weigh all trained tokens
        alike.

        Args:
            divisor: number that the loss divides its sum over tokens by. For a mean over the tokens of a whole step it
                is the step's trained tokens divided by the engine's accumulation steps.
            micro_batches: micro-batches of this step, if they may be fewer than the engine's accumulation steps, as at
                the end of an epoch.
        """
        steps = self.engine.gradient_accumulation_steps()
        self.curvature.loss_divided_by(divisor, divisor * steps / (micro_batches or steps))

    def step(self, probe: Closure | ProbeBatches | None = None) -> bool:
        """Follow an `engine.step`: count it, and move curvature, gates and masks if an update is due. Collective.

        Args:
            probe: needed if `needs_probe`: a function that runs the engine's forward on one micro-batch and returns the
                scalar loss, for example `lambda: engine(**batch).loss`, or an object with several batches
                (`ProbeBatches`). It is called only when an update is due, and leaves no trace.

        Returns:
            True if `metrics` are those of an update in this step. A method whose masks move in every step reports only
            some of its updates.

        Raises:
            ValueError: an update needs a probe, and there is none.
            ForgeError: this call is missing after an earlier engine step, no engine step was made since the last call,
                an earlier call broke off, or the curvature of a weight is missing.
        """
        self._require_finished()
        # Return at once if no step was made: gradients still accumulate, or fp16 overflowed.
        steps_begun = self._hooks.steps_begun
        # Refuse a call behind `close`, or without its probe, before anything is counted.
        if steps_begun == 1:
            self.curvature.require_open()
        if steps_begun == 1 and self.ready and self.method.measures(self.step_count + 1):
            self.curvature.require_probe(probe, "step")
        self._hooks.steps_begun = 0
        self._require_engine_step()
        if steps_begun == 0:
            # Drop what the skipped step measured.
            if self._skipped != self.engine.skipped_steps:
                self._listen()
            return False
        if steps_begun > 1:
            raise ForgeError(
                f"{steps_begun} optimizer steps since the last forge.step; call it after every engine.step"
            )
        if not self.ready:
            raise ForgeError(
                "what this run does before its first step (masks, blocks, a shift) is not done yet: call "
                "forge.start(probe) before the first engine.step"
            )
        self._call_in_progress = "forge.step"
        self.sharded.step += 1
        # A user's loop may not have said how many steps it makes. A continued run may be longer on purpose.
        is_past_end = self.step_count == self.config.max_steps + 1
        if is_past_end and not self._saved.loaded and self.sharded.layout.rank == 0:
            _LOG.warning(
                "step %d is past max_steps, over which masks are scheduled; give the number of steps of the whole "
                "run: SparseForgeConfig(max_steps=...), or SparseForge(engine, config, max_steps=...)",
                self.step_count,
            )
        # Take the curvature that this step measured, and move the masks if that is due.
        self.curvature.take_measured()
        metrics = self.method.update(self.step_count, probe)
        has_new_branches = self._switch_on_branches(self.step_count)
        if metrics is not None:
            self.metrics = metrics
        # The next forward sees what changed after the optimizer's step.
        if has_new_branches or (metrics is not None and self.method.needs_republish):
            self._republish()
        self._release_if_due()
        self._listen()
        self._call_in_progress = None
        return metrics is not None

    def finish(self) -> None:
        """Check a run at its end.

        Raises:
            ForgeError: `step` was not called, the mask of some weight was formed without its curvature, or never
                frozen, or the run diverged.
        """
        self._require_followed()
        self.curvature.require_refreshed()
        if self.step_count < self.schedule.freeze_step:
            raise ForgeError(
                f"the run ended at step {self.step_count}, before the mask is frozen at {self.schedule.freeze_step}; "
                "make more steps, or set max_steps to the steps of the whole run. To go on later, save a checkpoint"
            )
        self.require_finite()
        self.close()

    def close(self) -> None:
        """Let go of the model and of torch.compile, after an error that ends the loop. Does not communicate.

        Until then the hooks that measure in the next training step stay, and what is compiled runs in eager mode.
        `finish` calls it. It may be called more than once.
        """
        self.curvature.close()

    def require_finite(self, cure: str = "go back to a checkpoint of before, with a lower learning rate") -> None:
        """Check that weights and their optimizer states are finite. Collective, one reduction.

        `finish` calls it, and so does `engine.save_checkpoint`, which would otherwise write what nobody can use.

        Args:
            cure: end of the message.

        Raises:
            DivergedError: some values are infinite or NaN.
        """
        self.sharded.require_finite(cure)

    @property
    def dials(self) -> Dials | None:
        """Annealed numbers after the steps so far; None for methods that anneal none."""
        return self.schedule.dials(self.step_count) if isinstance(self.schedule, Schedule) else None

    @property
    def phase(self) -> str:
        """Name of the phase after the steps so far: heating, hardening, frozen; of other methods, moving or frozen."""
        return self.schedule.phase(self.step_count)

    def soft_to_hard_gap(self, probe: Closure) -> float:
        """Return the loss with the mask hardened now minus the loss as it is. Two forwards; collective.

        Raises:
            ForgeError: a call before has broken off.
        """
        self._require_finished()
        losses = [self._extra_passes.loss(probe)]
        self._call_in_progress = "forge.soft_to_hard_gap"
        self._republish(hard=True)
        losses.append(self._extra_passes.loss(probe))
        self._republish()
        self._call_in_progress = None
        gap = (losses[1] - losses[0]).to(self.sharded.layout.device)
        return self.sharded.layout.all_reduce(gap).item() / self.sharded.layout.world_size

    def histograms(self, bins: int = 20) -> dict[str, tuple[list[int], list[float]]]:
        """Return counts and bin edges of every mask, and of log10 |H| of every curvature. Collective."""
        return histograms(self.curvature, bins)

    def state_dict(self) -> dict[str, Any]:
        """Return the client state that `engine.save_checkpoint` saves as "sparseforge": plain JSON types. Collective.

        States with one number per weight are optimizer state already; row and column sums are here, as text.

        Raises:
            ValueError: `start` was called, no step was made yet, and not `can_save_start`.
            ForgeError: the newest step of the engine was not followed by `step`.
        """
        self._require_followed()
        fresh = self._needs_start and self.ready and not self.step_count
        if fresh and self.config.max_steps and not self.can_save_start:
            raise ValueError(
                "a checkpoint between forge.start and the first step would lose the weights that the starting mask "
                "removes or a shift moves: save after a step, or before forge.start"
            )
        return {**self._saved.state_dict(), "started": self.ready}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue a saved run in this engine; world size, ZeRO stage and offload may differ. Collective.

        On the same layout all weights, states and counters are bit for bit those of the saved run (DeepSpeed's own Adam
        on CPUs differs in the last bits). No pickle is executed.
        `engine.load_checkpoint` calls it with a checkpoint whose bytes it has checked.

        Raises:
            ValueError: the checkpoint was made with another configuration, model or optimizer, or cannot be read; all
                ranks raise it. Nothing has changed then, unless the pattern of a frozen run is wrong: that is checked
                last, after its weights were loaded.
            ForgeError: a step of the optimizer or a probe broke off, and the engine holds a part of it.
        """
        self._require_sound_engine()
        self._saved.load(checkpoint)
        self._hooks.steps_begun = 0
        self._micro_steps = -1
        self._call_in_progress = None
        self.ready = self.step_count > 0 or not self._needs_start or self._saved.started
        self.method.resume()
        if self.sharded.quantizer is not None:
            self._republish()  # a frozen run's masters were read from W
        self._listen()

    @property
    def _needs_start(self) -> bool:
        """True if `start` must come before the first step."""
        return self.method.needs_start or self.config.moves_weights_into_branches

    @property
    def can_save_start(self) -> bool:
        """True if the masters and the optimizer state together hold everything that `start` computed.

        A part of W exists only outside the optimizer's state where masters have 16 bits or are quantized, and where a
        starting mask or a shift took it from the masters.
        """
        nothing_removed = self.config.soft is not None and not self.config.moves_weights_into_branches
        return not self.sharded.state.has_waiting_state or (nothing_removed and self._masters_are_exact(0))

    def _masters_are_exact(self, step: int) -> bool:
        """Return True if masters hold m_eff W to the bit after `step`: in 32 bits, and not quantized."""
        in_32_bits = all(flat.dtype == torch.float32 for flat in self.sharded.layout.flats)
        return in_32_bits and not self.config.is_quantized(step)

    def _require_engine_step(self) -> None:
        """Raise ForgeError if the engine has made no `step` call since the last time that this was called."""
        micro_steps = self.engine.micro_steps
        # accelerate sets the boundary itself, and skips engine.step between boundaries.
        accumulates = self.engine._is_gradient_accumulation_boundary is False
        if micro_steps == self._micro_steps and not accumulates:
            raise ForgeError("forge.step was called before engine.step; call it after every engine.step")
        self._micro_steps = micro_steps

    def _require_finished(self) -> None:
        """Raise ForgeError if a call has broken off between two states of the weights."""
        self._require_sound_engine()
        if self._call_in_progress is not None:
            raise ForgeError(
                f"{self._call_in_progress} broke off with an error, and weights or masks may be half changed; go back "
                "to a checkpoint by engine.load_checkpoint, or begin again"
            )

    def _require_sound_engine(self) -> None:
        """Raise ForgeError if a step of the optimizer or a probe has broken off inside of the engine."""
        self._hooks.require_finished()
        self._extra_passes.require_finished()

    def _require_followed(self) -> None:
        """Raise ForgeError if steps of the engine were not followed by `step`, or it has broken off."""
        self._require_finished()
        if steps := self._hooks.steps_begun:
            raise ForgeError(
                f"forge.step was not called after {steps} steps of the engine; call it after every engine.step"
            )

    def _listen(self) -> None:
        """Measure the curvature in the next step's passes if a mask update needs it. Drop measurements not taken."""
        self._skipped = self.engine.skipped_steps
        self.curvature.listen()

    # -- publication --------------------------------------------------------------------------------------------------

    def _republish(self, hard: bool = False) -> None:
        """Make the present masks visible to the next forward; with `hard`, as if they were frozen now."""
        self.method.write_masters(hard)
        self.sharded.layout.push()

    def _release_if_due(self) -> None:
        """Note whether masks are frozen; at the release keep one bit a weight, and train the masters."""
        self.sharded.state.frozen = self.step_count >= self.schedule.freeze_step
        if self.step_count == self.config.release_step:
            self.sharded.state.release()
            self.sharded.metrics.forget()
            self._republish()

    def _switch_on_branches(self, step: int) -> bool:
        """Start every B of SLoRB from what the mask removes, and switch the branches on, if it is their step."""
        if step != self.config.branch_step or self.config.moves_weights_into_branches:
            return False
        are_exact = self._masters_are_exact(step)
        if are_exact:  # they spare a copy of m_eff W
            self.method.write_masters()
        switch_on_branches(self.sharded, None if are_exact else self.method.publish)
        return True
