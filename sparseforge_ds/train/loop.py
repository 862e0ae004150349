"""The training loop, spelled out.

The teacher over the step's sequences; then for every micro-batch forward, loss, backward, step and `forge.step`, which
updates the mask when an update is due. The teacher stays on to the last step of the frozen finetune.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from sparseforge_ds.data.micro_batch import MicroBatch
from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.sharded_weights import DivergedError
from sparseforge_ds.train.banner import readable_bytes
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.engine import TrainContext
from sparseforge_ds.train.evaluation import Evaluation
from sparseforge_ds.train.monitoring import Monitor
from sparseforge_ds.train.objective import LOSSES
from sparseforge_ds.train.preemption import Preemption, Stopped
from sparseforge_ds.zero.probe import Closure

_LOG = logging.getLogger(__name__)
PATIENCE = 10
"""Steps in a row whose loss may be infinite or NaN before the run stops (fp16 overflows now and then)."""
OVERFLOWS = 100
"""Steps in a row that may be skipped, as fp16 does: more than a dynamic loss scale takes to its smallest value."""


class RunDivergedError(AgreedError):
    """The loss or the weights are infinite or NaN: a result, of a learning rate that is too high."""

    def __init__(self, message: str, last_good_checkpoint: Path | None) -> None:
        super().__init__(message)
        self.last_good_checkpoint = last_good_checkpoint
        """The newest checkpoint that the run can go back to."""


def train(
    context: TrainContext, checkpoints: Checkpoints, monitor: Monitor, preemption: Preemption, evaluation: Evaluation
) -> dict[str, Any]:
    """Train until all optimizer steps of the run have been applied, and save.

    Returns:
        What the run came to, for `result.json`.

    Raises:
        Stopped: some rank was asked to make room; the present step is saved.
        RunDivergedError: the loss stays infinite or NaN.
        AgreedError: the text cannot be read any further; the steps until then are saved.
        ValueError: a weight was pruned without ever having been measured.
        OSError: a checkpoint cannot be written.
    """
    spec, engine, forge, batches = context.spec, context.engine, context.forge, context.batches
    max_steps, rate = spec.steps, spec.learning_rate
    began, first_step = time.perf_counter(), forge.step_count
    scalars: dict[str, float] = {}

    @contextmanager
    def watching(step: int) -> Iterator[None]:
        """Turn weights that are lost into the error of the run."""
        try:
            yield
        except DivergedError as error:
            what = "weights are infinite or NaN, and were not saved: the run has diverged"
            # The checkpoint of this start is no better where the very next step loses the weights.
            lost_at = first_step if step == first_step + 1 else None
            raise _diverged(checkpoints, what, step, rate(max(step - 1, 0)), lost_at) from error

    whole = context.objective.why_whole_logits(batches.batch_at(batches.position)[:1, :1].to(context.device))
    if whole:
        _LOG.info(f"whole logits of both models, which take more memory than blocks of them: {whole}")
    saved, failures, skipped = first_step if spec.arguments.resume else None, 0, 0
    lost_at: int | None = None  # the first of the latest steps in a row whose weights have a loss that is not finite
    if first_step == 0:
        started = forge.ready
        forge.start(probe=ProbeBatches(context, 0, 1, _sequences_of_start(context)))
        if not started and spec.config.start is not None and spec.arguments.save_every and max_steps:
            save(context, checkpoints, monitor, evaluation, 0)  # a run that is resumed does not repeat the start
            saved = 0
    _evaluate_if_due(evaluation, monitor, first_step)  # of a resumed run only where the step before it was its last

    while forge.step_count < max_steps:
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = rate(forge.step_count)
        before, updated = forge.step_count, False
        try:
            batches.prepare_step()
        except AgreedError:  # between two steps: all ranks are here, and nothing is half done
            if before and saved != before and not failures:
                with watching(before):
                    save(context, checkpoints, monitor, evaluation, before)
            raise
        losses = torch.zeros(len(LOSSES), device=context.device)
        micro_batches = [batch.to(context.device) for batch in batches.step()]
        with ExitStack() as teaching:
            for number, batch in enumerate(micro_batches, 1):
                next(batches)
                if number == 1 or context.objective.one_at_a_time:
                    teaching.close()
                    together = [batch] if context.objective.one_at_a_time else micro_batches
                    targets = iter(teaching.enter_context(context.objective.targets(together)))
                loss, parts = context.objective.loss(batch, next(targets), before / spec.config.max_steps)
                if batch.trained is not None:
                    forge.loss_divided_by(batch.trained)
                engine.backward(loss)
                if number == len(micro_batches):
                    teaching.close()
                engine.step()
                losses += parts
                try:
                    updated = forge.step(probe=ProbeBatches(context, batches.position, -1))
                except RuntimeError as error:
                    finite = bool(torch.isfinite(losses).all())
                    if finite and not isinstance(error, DivergedError):
                        raise
                    what = (
                        "the loss is finite, but its curvature is not" if finite else f"the loss is {float(losses[0])}"
                    )
                    if not finite and lost_at is None:
                        lost_at = before
                    raise _diverged(checkpoints, what, before, rate(before), lost_at) from error
        step = forge.step_count

        losses /= batches.layout.accumulation
        agreed = torch.cat([losses, losses.new_full((1,), float(preemption.requested > 0))])
        dist.all_reduce(agreed)
        *means, asked = (agreed / context.ranks.world_size).tolist()
        mean = dict(zip(LOSSES, means, strict=True))
        total = mean["total"]
        failures = 0 if math.isfinite(total) else failures + 1
        lost_at = None if not failures else before if failures == 1 else lost_at
        if failures == PATIENCE:
            what = f"the loss has been {total} for {PATIENCE} steps in a row"
            raise _diverged(checkpoints, what, step, rate(before), lost_at)
        skipped = 0 if step > before else skipped + 1
        if skipped == OVERFLOWS:
            if spec.dtype == torch.float16:
                what = f"gradients have overflowed in {OVERFLOWS} steps in a row, which fp16 skips"
                cure = "use bf16, or a smaller fp16.loss_scale or fp16.min_loss_scale"
                raise _diverged(checkpoints, what, step, rate(before), cure=cure)
            what = f"gradients are infinite or NaN in {OVERFLOWS} steps in a row, which are skipped"
            raise _diverged(checkpoints, what, step, rate(before), lost_at=step)
        if step > before:  # loss scaling did not skip the step
            absent = {"kl"} if context.objective.teacher is None else set()
            absent |= {name for name in ("hidden", "balance") if not mean[name]}
            scalars = {f"loss/{name}": mean[name] for name in LOSSES if name not in absent}
            scalars["train/learning_rate"] = rate(before)
            norm = engine.get_global_grad_norm()
            if norm is not None:  # stage 0 in fp32 without clipping computes none
                scalars["train/grad_norm"] = float(norm)
            scalars |= batches.scalars()
            monitor.step(step, scalars, forge.phase, forge.dials)
            if updated:
                monitor.write(step, forge.metrics)
            _look_closer(context, monitor, step)
            if not failures:  # the newest checkpoint is of weights that have a finite loss
                checkpoints.remove_old()
        stop = asked > 0 and not failures and step < max_steps
        if not stop and not failures:  # who asks to stop does not wait long; the resumed run makes up for it
            _evaluate_if_due(evaluation, monitor, step)
        due = spec.arguments.save_every and step % spec.arguments.save_every == 0
        if (due or stop) and not failures and saved != step and step:
            with watching(step):
                save(context, checkpoints, monitor, evaluation, step)
            saved = step
        if stop:
            checkpoints.remove_old()
            asked_by = max(context.ranks.gather(preemption.requested))
            raise Stopped(asked_by, f"at step {step}" + ("" if step else ", with nothing to save yet"))

    if failures:
        what = "the run ended on a loss that is not finite"
        raise _diverged(checkpoints, what, max_steps, rate(max_steps - 1), lost_at)
    with watching(max_steps):
        forge.finish()
        if saved != max_steps:
            save(context, checkpoints, monitor, evaluation, max_steps)
    checkpoints.remove_old()
    return run_result(context, evaluation, first_step, round(time.perf_counter() - began, 1), scalars)


def run_result(
    context: TrainContext,
    evaluation: Evaluation,
    first_step: int,
    seconds: float = 0.0,
    scalars: dict[str, float] | None = None,
) -> dict[str, Any]:
    """What a finished run came to, for `result.json`: by default of a start that trained nothing."""
    steps = context.forge.step_count
    return {
        "steps": steps,
        "tokens": steps * context.spec.tokens_per_step,
        "seconds": seconds,
        "steps_of_this_start": steps - first_step,
        "last_step": scalars or {},
        **evaluation.result(),
    }


def save(context: TrainContext, checkpoints: Checkpoints, monitor: Monitor, evaluation: Evaluation, step: int) -> None:
    """Save everything that a resumed run needs."""
    state = {
        "step": step,
        "steps": context.spec.steps,
        "tokens": step * context.spec.tokens_per_step,
        "data": context.batches.state_dict(),
        "evaluations": evaluation.state_dict(),
    }
    with monitor.paused_clock():
        done = checkpoints.save(context.engine, step, {"train": state}, evaluation.ranking())
    monitor.write(step, {"checkpoint/seconds": done.seconds, "checkpoint/gib": done.bytes / 2**30})
    _LOG.info(
        f"saved {done.path.name}: {readable_bytes(done.bytes)} in {done.seconds:.1f} s, "
        f"of which {done.seconds_checking:.1f} s reading it back"
    )


def _evaluate_if_due(evaluation: Evaluation, monitor: Monitor, step: int) -> None:
    if evaluation.due(step):
        with monitor.paused_clock():
            scalars = evaluation.run(step)
        monitor.write(step, scalars)


class ProbeBatches:
    """What probes of the curvature read: the task loss on the run's own sequences, which are not consumed.

    Args:
        context: the run.
        position: sequences that the run has consumed.
        direction: -1 to walk back from here, a batch a probe, 1 to look ahead.
        sequences: of a probe batch; None: those of `curvature.sequences`, or of a step.
    """

    def __init__(self, context: TrainContext, position: int, direction: int, sequences: int | None = None) -> None:
        self.sequences = sequences or context.spec.config.curvature.sequences or context.batches.layout.global_batch
        self.context = context
        self.position = position
        self.direction = direction

    def passes(self, batch: int) -> list[Closure]:
        """This rank's micro-batches of a probe batch."""
        self.context.batches.require_trained(self._sequences(batch))
        return [partial(self._loss, micro_batch) for micro_batch in self._micro_batches(batch)]

    def divisor(self, batch: int) -> float | None:
        """Of the sum over the tokens of each."""
        return self._micro_batches(batch)[0].trained

    def _sequences(self, batch: int) -> range:
        size = self.sequences
        first = max(0, self.position + size * (batch if self.direction > 0 else -1 - batch))
        return range(first, first + size)

    def _micro_batches(self, batch: int) -> list[MicroBatch]:
        return self.context.batches.micro_batches(self._sequences(batch))

    def _loss(self, batch: MicroBatch) -> Tensor:
        return self.context.objective.cross_entropy(batch.to(self.context.device))


def _sequences_of_start(context: TrainContext) -> int | None:
    """Return the sequences of a step of the start, rounded up to those of a micro-batch of all ranks; None without
    one."""
    start, spec, at_once = context.spec.config.start, context.spec, context.batches.layout.sequences_at_once
    if start is None:
        return None
    tokens = start.tokens_of(spec.config.max_steps * spec.tokens_per_step)
    return math.ceil(start.sequences_of_step(tokens, spec.arguments.seq_length) / at_once) * at_once


def _look_closer(context: TrainContext, monitor: Monitor, step: int) -> None:
    """The log entries that cost something, at their own intervals. Every rank takes part."""
    every = context.spec.config.monitor
    if every.histograms_every and step % every.histograms_every == 0:
        monitor.histograms(step, context.forge.histograms())
    if every.gap_every and step % every.gap_every == 0:
        layout, position = context.batches.layout, context.batches.position
        (batch,) = context.batches.micro_batches(range(position - layout.sequences_at_once, position))  # read just now
        batch = batch.to(context.device)
        gap = context.forge.soft_to_hard_gap(lambda: context.objective.cross_entropy(batch))
        monitor.write(step, {"mask/soft_to_hard_gap": gap})


def _diverged(
    checkpoints: Checkpoints,
    what: str,
    step: int,
    rate: float,
    lost_at: int | None = None,
    cure: str = "lower --learning_rate or raise --warmup",
) -> RunDivergedError:
    """Make the error of a diverged run, which names the checkpoint to go back to.

    Args:
        checkpoints: of the run.
        what: has happened.
        step: at which it was seen.
        rate: the learning rate there.
        lost_at: the first step whose weights have a loss that is not finite; None where every saved one is good.
        cure: what to change.
    """
    good, newer = checkpoints.newest_before(sys.maxsize if lost_at is None else lost_at)
    away = f"move {', '.join(folder.name for folder in newer)} elsewhere, and " if newer else ""
    back = "start again: there is no earlier checkpoint" if good is None else f"continue from {good} with --resume"
    return RunDivergedError(f"{what}, at step {step} with learning rate {rate:.3g}; {cure}, and {away}{back}", good)
