"""Losses of the steps on their way from the device to the log, and to what the run decides by them.

A host that waits for the loss of each step lets the device run dry. So on an accelerator the numbers of a step are
copied without a wait, and read in the next step, behind a wait that DeepSpeed makes itself. Whatever depends on them,
such as a save, reads them before.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import deepspeed.comm as dist
import torch
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.divergence import DivergenceWatch
from sparseforge_ds.train.engine import TrainContext
from sparseforge_ds.train.monitoring import Monitor
from sparseforge_ds.train.objective import LOSSES

_LAST_WAIT = 10.0
"""Seconds that the end of a run by an error waits for numbers of the step before it."""


@dataclass(frozen=True)
class _Step:
    """Numbers of a step that was not read yet."""

    before: int
    """Optimizer steps applied before it."""
    after: int
    """Optimizer steps applied after it; equal to `before` where loss scaling has skipped it."""
    end_time: float
    """Clock of this process at its end, in seconds."""
    numbers: Tensor
    """fp64 on the host: losses, share of ranks that were asked to stop, and the gradient norm if there is one."""
    copied: torch.Event | None
    """Event after which `numbers` are on the host; None where they were computed there."""
    progress: dict[str, float]
    """Progress in the text, by tag."""
    mask_metrics: dict[str, float] | None
    """Metrics of the mask update that followed it, if one did."""
    phase: str
    dials: Dials | None


def waits_for(device: torch.device) -> bool:
    """Return True if the host waits for numbers of a device, so that they are better read a step later."""
    return device.type != "cpu"


class StepLog:
    """Reader of the numbers of steps, in the order of the steps.

    Args:
        context: the run.
        checkpoints: lose the oldest when newer weights have shown a finite loss.
        monitor: receives what is logged.
        watch: ends a run whose losses stay infinite or NaN.
    """

    def __init__(
        self, context: TrainContext, checkpoints: Checkpoints, monitor: Monitor, watch: DivergenceWatch
    ) -> None:
        self.scalars: dict[str, float] = {}
        """Metrics of the newest step that was read and applied, by tag."""
        self.asked_to_stop = False
        """True if some rank had been asked to stop by the end of the newest step that was read."""
        self._context = context
        self._checkpoints = checkpoints
        self._monitor = monitor
        self._watch = watch
        self._unread: _Step | None = None

    def add(self, before: int, losses: Tensor, stop_requested: bool, mask_updated: bool) -> None:
        """Average the numbers of the newest step over all ranks, and read them unless that is a wait. Collective.

        Args:
            before: optimizer steps applied before it.
            losses: (len(LOSSES),) sums over its micro-batches on this rank.
            stop_requested: True if this rank was asked to stop.
            mask_updated: True if a mask update followed the step.
        """
        assert self._unread is None, "steps are read in their order"
        context = self._context
        # One message has the losses, and says whether any rank was asked to stop.
        losses = losses / context.batches.layout.accumulation
        shared = torch.cat([losses, losses.new_full((1,), float(stop_requested))])
        dist.all_reduce(shared)
        numbers = (shared / context.ranks.world_size).double()
        # Stage 0 in fp32 without clipping has no norm. A skipped step has a number instead of a tensor.
        norm = context.engine.get_global_grad_norm()
        if norm is not None:
            norm = norm.detach().double() if isinstance(norm, Tensor) else numbers.new_full((), float(norm))
            numbers = torch.cat([numbers, norm.to(numbers.device).reshape(1)])
        # From a device the copy goes to pinned memory. A read of it waits for no later work.
        copied = None
        if numbers.device.type != "cpu":
            numbers = numbers.to("cpu", non_blocking=True)
            copied = torch.Event(context.device)
            copied.record()
        self._unread = _Step(
            before=before,
            after=context.forge.step_count,
            end_time=time.perf_counter(),
            numbers=numbers,
            copied=copied,
            progress=context.batches.scalars(),
            mask_metrics=context.forge.metrics if mask_updated else None,
            phase=context.forge.phase,
            dials=context.forge.dials,
        )
        if not waits_for(context.device):
            self.read()

    def read(self) -> None:
        """Read and log the newest step, if that is still to do. Collective.

        Raises:
            TrainingDivergedError: too many steps in a row had a loss that is not finite, or were skipped.
        """
        step = self._unread
        if step is None:
            return
        self._unread = None
        if step.copied is not None:
            step.copied.synchronize()
        *means, share_asked_to_stop = step.numbers[: len(LOSSES) + 1].tolist()
        self.asked_to_stop = share_asked_to_stop > 0
        self._watch.count_step(means[LOSSES.index("total")], step.before, step.after)
        self._log(step)
        # The newest checkpoint now is of weights that have a finite loss, so older ones may go.
        if step.after > step.before and self._watch.loss_is_finite:
            self._checkpoints.remove_old()

    def close(self) -> None:
        """Log the step that an error of the next one has left unread, if its numbers arrive. Not collective."""
        step = self._unread
        self._unread = None
        if step is None:
            return
        with contextlib.suppress(RuntimeError):  # the device itself may be the error
            # Another rank may be gone, which this one would wait for.
            deadline = time.monotonic() + _LAST_WAIT
            while step.copied is not None and not step.copied.query():
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)
            self._log(step)

    def _log(self, step: _Step) -> None:
        """Log a step unless loss scaling has skipped it, without losses that the run does not have."""
        if step.after == step.before:
            return
        mean = dict(zip(LOSSES, step.numbers.tolist(), strict=False))
        norms = step.numbers[len(LOSSES) + 1 :].tolist()
        teaches = self._context.objective.teacher is not None or self._context.batches.teacher_logits is not None
        absent = set() if teaches else {"kl"}
        absent |= {name for name in ("hidden", "balance") if not mean[name]}
        self.scalars = {f"loss/{name}": mean[name] for name in LOSSES if name not in absent}
        self.scalars["train/learning_rate"] = self._context.spec.learning_rate(step.before)
        if norms:
            self.scalars["train/grad_norm"] = norms[0]
        self.scalars |= step.progress
        self._monitor.step(step.after, self.scalars, step.phase, step.dials, step.end_time)
        if step.mask_metrics is not None:
            self._monitor.write(step.after, step.mask_metrics)
