"""Divergence of a run: the bad steps that end it, and the error that names the checkpoint to go back to."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.sharded_weights import DivergedError
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.spec import RunSpec

PATIENCE = 10
"""Steps in a row whose loss may be infinite or NaN before the run ends (fp16 overflows now and then)."""
OVERFLOWS = 100
"""Steps in a row that may be skipped, as fp16 does: more than a dynamic loss scale takes to its smallest value."""


class TrainingDivergedError(AgreedError):
    """The loss or the weights are infinite or NaN: a result, of a learning rate that is too high."""

    def __init__(self, message: str, last_good_checkpoint: Path | None) -> None:
        super().__init__(message)
        self.last_good_checkpoint = last_good_checkpoint
        """The newest checkpoint that the run can go back to."""


class DivergenceWatch:
    """Counts the latest steps in a row that went wrong, and ends the run where they are too many.

    Args:
        checkpoints: the checkpoints of the run.
        spec: its settings.
        first_step: steps already done when this process started.
    """

    def __init__(self, checkpoints: Checkpoints, spec: RunSpec, first_step: int) -> None:
        self._checkpoints = checkpoints
        self._spec = spec
        self._first_step = first_step
        self._bad_losses = 0
        self._skipped = 0
        self._lost_at: int | None = None
        """First of the latest steps in a row whose weights have a loss that is not finite."""

    @property
    def loss_is_finite(self) -> bool:
        """Return whether the newest step had a finite loss."""
        return self._bad_losses == 0

    def count_step(self, loss: float, before: int, after: int) -> None:
        """Count one step of the engine.

        Args:
            loss: mean over all ranks.
            before: optimizer steps applied before it.
            after: optimizer steps applied after it; equal to `before` where the step was skipped.

        Raises:
            TrainingDivergedError: too many steps in a row had a loss that is not finite, or were skipped.
        """
        # Count losses that are not finite, and remember where they began.
        if math.isfinite(loss):
            self._bad_losses = 0
            self._lost_at = None
        else:
            self._bad_losses += 1
            if self._bad_losses == 1:
                self._lost_at = before
        if self._bad_losses == PATIENCE:
            raise self._error(f"the loss has been {loss} for {PATIENCE} steps in a row", after, before, self._lost_at)

        # Count skipped steps: their gradients were infinite or NaN.
        self._skipped = 0 if after > before else self._skipped + 1
        if self._skipped == OVERFLOWS:
            if self._spec.dtype == torch.float16:
                problem = f"gradients have overflowed in {OVERFLOWS} steps in a row, which fp16 skips"
                cure = "use bf16, or a smaller fp16.loss_scale or fp16.min_loss_scale"
                raise self._error(problem, after, before, cure=cure)
            problem = f"gradients are infinite or NaN in {OVERFLOWS} steps in a row, which are skipped"
            raise self._error(problem, after, before, lost_at=after)

    def check_end(self) -> None:
        """Raise TrainingDivergedError where the last step of the run had a loss that is not finite."""
        if self._bad_losses:
            steps = self._spec.steps
            raise self._error("the run ended on a loss that is not finite", steps, steps - 1, self._lost_at)

    @contextmanager
    def mask_update(self, before: int, losses: Tensor) -> Iterator[None]:
        """Turn an error of `forge.step` into the run's error where loss, weights or curvature are not finite.

        Args:
            before: optimizer steps applied before this one.
            losses: sums of this step's losses on this rank; the first one is the total.
        """
        try:
            yield
        except RuntimeError as error:
            is_finite = bool(torch.isfinite(losses).all())
            if is_finite and not isinstance(error, DivergedError):
                raise
            problem = "the loss is finite, but its curvature is not" if is_finite else f"the loss is {float(losses[0])}"
            lost_at = before if not is_finite and self._lost_at is None else self._lost_at
            raise self._error(problem, before, before, lost_at) from error

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Turn weights that cannot be saved, because they are infinite or NaN, into the run's error."""
        try:
            yield
        except DivergedError as error:
            problem = "weights are infinite or NaN, and were not saved: the run has diverged"
            # The checkpoint of this launch is no better where the very next step loses the weights.
            lost_at = self._first_step if step == self._first_step + 1 else None
            raise self._error(problem, step, max(step - 1, 0), lost_at) from error

    def _error(
        self,
        problem: str,
        step: int,
        rate_step: int,
        lost_at: int | None = None,
        cure: str | None = None,
    ) -> TrainingDivergedError:
        """Make the error of a diverged run, which names the checkpoint to go back to.

        Args:
            problem: the beginning of the message.
            step: the step at which it was seen.
            rate_step: the step whose learning rate the message names.
            lost_at: the first step whose weights have a loss that is not finite; None where every saved one is good.
            cure: advice on what to change; None for a smaller learning rate.
        """
        if cure is None:
            has_own_rate = "muon_lr" in self._spec.deepspeed["optimizer"]["params"]
            cure = f"lower {'muon_lr' if has_own_rate else '--learning_rate'} or raise --warmup"
        good, newer = self._checkpoints.newest_before(sys.maxsize if lost_at is None else lost_at)
        away = f"move {', '.join(folder.name for folder in newer)} elsewhere, and " if newer else ""
        back = "start again: there is no earlier checkpoint" if good is None else f"continue from {good} with --resume"
        rate = self._spec.learning_rate(rate_step)
        return TrainingDivergedError(
            f"{problem}, at step {step} with learning rate {rate:.3g}; {cure}, and {away}{back}", good
        )
