"""The training loop, spelled out.

Each step runs the teacher over the step's sequences. Then every micro-batch takes a forward pass, the loss, a backward
pass, `engine.step` and `forge.step`, which updates the mask when an update is due. The teacher stays on to the last
step of the frozen finetune.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.data.micro_batch import BatchLayout, MicroBatch
from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.train.banner import readable_bytes
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.divergence import DivergenceWatch
from sparseforge_ds.train.engine import Beginning, TrainContext
from sparseforge_ds.train.evaluation import Evaluation
from sparseforge_ds.train.monitoring import Monitor
from sparseforge_ds.train.objective import LOSSES
from sparseforge_ds.train.preemption import PreemptedError, Preemption
from sparseforge_ds.train.step_log import StepLog
from sparseforge_ds.zero.extra_passes import Closure

_LOG = logging.getLogger(__name__)


def train(
    context: TrainContext, checkpoints: Checkpoints, monitor: Monitor, preemption: Preemption, evaluation: Evaluation
) -> dict[str, Any]:
    """Train until all optimizer steps of the run have been applied, and save.

    Returns:
        The content of `result.json`.

    Raises:
        PreemptedError: some rank was asked to make room; the present step is saved.
        TrainingDivergedError: the loss stays infinite or NaN.
        AgreedError: the text cannot be read any further; the steps until then are saved.
        ValueError: a weight was pruned without ever having been measured.
        OSError: a checkpoint cannot be written.
    """
    watch = DivergenceWatch(checkpoints, context.spec, context.forge.step_count)
    with closing(StepLog(context, checkpoints, monitor, watch)) as step_log:
        return _train(context, checkpoints, monitor, preemption, evaluation, watch, step_log)


def _train(
    context: TrainContext,
    checkpoints: Checkpoints,
    monitor: Monitor,
    preemption: Preemption,
    evaluation: Evaluation,
    watch: DivergenceWatch,
    step_log: StepLog,
) -> dict[str, Any]:
    """Do `train`, with what counts and logs its losses."""
    spec = context.spec
    engine = context.engine
    forge = context.forge
    batches = context.batches
    objective = context.objective
    start_time = time.perf_counter()
    first_step = forge.step_count

    # Decide once how logits are made: whole, or in blocks by the heads, which takes less memory.
    next_sequences = range(batches.position, batches.position + batches.layout.sequences_at_once)
    (batch,) = batches.micro_batches(next_sequences, with_logits=False)
    if reason := objective.why_whole_logits(batch.token_BS[:1, :1].to(context.device)):
        _LOG.info(f"whole logits of both models, which take more memory than blocks of them: {reason}")

    # A run at step 0 needs its first mask. One that was resumed later has read it from the checkpoint of that step.
    saved_step: int | None = first_step
    if first_step:
        preemption.begin_steps()
    else:
        saved_step = _start(context, checkpoints, monitor, preemption, evaluation)
    # A resumed run is scored here only where the step before the stop was due and was not scored.
    _evaluate_if_due(evaluation, monitor, first_step)

    # A stream may give no text for minutes, in which a signal must not be lost.
    batches.stop_waiting_if(lambda: preemption.requested > 0)
    while forge.step_count < spec.steps:
        before = forge.step_count
        rate = spec.learning_rate(before)
        for param_group in engine.basic_optimizer.param_groups:
            param_group["lr"] = rate * spec.share_of_rate(param_group)

        # Have the text of this step at hand. Where it cannot be read any further, save the steps until here: all ranks
        # are between two steps, and nothing is half done.
        try:
            step_batches = _read_step(context)
        except AgreedError:
            step_log.read()
            if before and saved_step != before and watch.loss_is_finite:
                with watch.saving(before):
                    save(context, checkpoints, monitor, evaluation, before)
            _end_if_asked(context, checkpoints, preemption, before)
            raise
        micro_batches = [batch.to(context.device) for batch in step_batches]

        losses = torch.zeros(len(LOSSES), device=context.device)
        mask_updated = False
        with ExitStack() as teaching:
            for number, batch in enumerate(micro_batches, 1):
                batches.advance()
                # The teacher answers for all micro-batches at once, or for each where its hidden states are distilled.
                if number == 1 or objective.one_at_a_time:
                    teaching.close()
                    taught = [batch] if objective.one_at_a_time else micro_batches
                    targets = iter(teaching.enter_context(objective.targets(taught)))
                loss, parts = objective.loss(batch, next(targets), before / spec.config.max_steps)
                if batch.trained is not None:
                    forge.loss_divided_by(batch.trained)
                engine.backward(loss)
                # Free the teacher's targets before the optimizer takes its step.
                if number == len(micro_batches):
                    teaching.close()
                engine.step()
                losses += parts
                # The device has done the step before: the engine waits for it to clip gradients.
                if number == len(micro_batches):
                    step_log.read()
                with watch.mask_update(before, losses):
                    mask_updated = forge.step(probe=RunProbeBatches(context, batches.position, -1))
        step = forge.step_count
        context.rates += rate * (step - before)  # none where an overflow skipped the step

        # Log the step: at once where something depends on its loss, and otherwise in the next one.
        step_log.add(before, losses, preemption.requested > 0, mask_updated)
        due = spec.arguments.save_every and step % spec.arguments.save_every == 0
        monitored = spec.config.monitor
        masks_due = any(every and step % every == 0 for every in (monitored.histograms_every, monitored.gap_every))
        if due or masks_due or step_log.asked_to_stop or evaluation.due(step) or step >= spec.steps:
            step_log.read()
        if step > before:
            log_masks(context, monitor, step)

        # Score the model, but not while somebody waits for the end: the resumed run makes up for it.
        stopping = step_log.asked_to_stop and watch.loss_is_finite and step < spec.steps
        if not stopping and watch.loss_is_finite:
            _evaluate_if_due(evaluation, monitor, step)

        # Save where a checkpoint is due, or the run is to stop.
        if (due or stopping) and watch.loss_is_finite and saved_step != step and step:
            with watch.saving(step):
                save(context, checkpoints, monitor, evaluation, step)
            saved_step = step
        if stopping:
            _end_if_asked(context, checkpoints, preemption, step)

    # The run is complete: make the mask final, and save.
    watch.check_end()
    with watch.saving(spec.steps):
        forge.finish()
        if saved_step != spec.steps:
            save(context, checkpoints, monitor, evaluation, spec.steps)
    checkpoints.remove_old()
    return run_result(context, evaluation, first_step, round(time.perf_counter() - start_time, 1), step_log.scalars)


def _start(
    context: TrainContext, checkpoints: Checkpoints, monitor: Monitor, preemption: Preemption, evaluation: Evaluation
) -> int | None:
    """Choose the first mask of a run at step 0, and return 0 if a checkpoint holds that step, or else None. Collective.

    A block-wise start is saved, so that a resumed run does not repeat it.
    """
    spec = context.spec
    forge = context.forge
    was_ready = forge.ready
    rms = forge.sharded.rms()
    probe = _block_start_batches(context)
    began = time.perf_counter()
    with monitor.paused_clock():
        forge.start(probe)
    preemption.begin_steps()
    # A run that was resumed at step 0 keeps what its checkpoint says of the start.
    if spec.arguments.resume:
        saved_step = 0
    else:
        seconds = context.ranks.on_first(lambda: round(time.perf_counter() - began, 1))
        context.beginning = Beginning(probe.tokens_read, max(probe.epochs, 1), seconds, rms)
        saved_step = None
    saves = spec.arguments.save_every and spec.steps and forge.can_save_start
    if not was_ready and spec.config.start is not None and saves:
        save(context, checkpoints, monitor, evaluation, 0)
        saved_step = 0
    return saved_step


def _read_step(context: TrainContext) -> list[MicroBatch]:
    """Return this rank's micro-batches of the next step. Collective.

    Raises:
        AgreedError: some rank cannot read its text, or the stored logits of its own sequences.
    """
    batches = context.batches
    batches.prepare_step()
    # Ranks read different logits, and so one rank alone may find them damaged.
    return batches.step() if batches.teacher_logits is None else context.ranks.all_or_raise(batches.step)


def _end_if_asked(context: TrainContext, checkpoints: Checkpoints, preemption: Preemption, step: int) -> None:
    """Raise PreemptedError if a signal has asked a rank to stop. Collective; the caller has saved before."""
    if signal_number := max(context.ranks.gather(preemption.requested)):
        checkpoints.remove_old()
        raise PreemptedError(signal_number, f"at step {step}" + ("" if step else ", with nothing to save yet"))


def run_result(
    context: TrainContext,
    evaluation: Evaluation,
    first_step: int,
    seconds: float = 0.0,
    scalars: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Return the content of `result.json` for a finished run; the defaults are for a process that trained nothing.

    `path` says how far weights could travel, in units of their size. It is the sum of all steps' learning rates, by
    the root mean square (RMS) of the weights under a mask before the start. Adam moves a weight by about the learning
    rate in a step. Training inside the start is no part of it.
    """
    spec = context.spec
    steps = context.forge.step_count
    beginning = context.beginning
    rms = 0.0 if beginning is None else beginning.rms
    return {
        "steps": steps,
        "tokens": steps * spec.tokens_per_step,
        "seconds": seconds,
        "start": beginning and asdict(beginning),
        "path": context.rates / rms if rms else None,
        "steps_of_this_launch": steps - first_step,
        "last_step": scalars or {},
        **evaluation.result(),
    }


def save(context: TrainContext, checkpoints: Checkpoints, monitor: Monitor, evaluation: Evaluation, step: int) -> None:
    """Save everything that a resumed run needs. Collective."""
    state = {
        "step": step,
        "steps": context.spec.steps,
        "tokens": step * context.spec.tokens_per_step,
        "data": context.batches.state_dict(),
        "evaluations": evaluation.state_dict(),
        "beginning": context.beginning and asdict(context.beginning),
        "rates": context.rates,
    }
    with monitor.paused_clock():
        saved = checkpoints.save(context.engine, step, {"train": state}, evaluation.ranking())
    monitor.write(step, {"checkpoint/seconds": saved.seconds, "checkpoint/gib": saved.bytes / 2**30})
    _LOG.info(
        f"saved {saved.path.name}: {readable_bytes(saved.bytes)} in {saved.seconds:.1f} s, "
        f"of which {saved.seconds_checking:.1f} s reading it back"
    )


def _evaluate_if_due(evaluation: Evaluation, monitor: Monitor, step: int) -> None:
    """Score the model on held-out text where that is due after `step`. Collective."""
    if evaluation.due(step):
        with monitor.paused_clock():
            scalars = evaluation.score(step)
        monitor.write(step, scalars)


class RunProbeBatches:
    """The run's own sequences for probes of the curvature, which take the task loss and consume no text.

    Args:
        context: the run.
        position: sequences that the run has consumed.
        direction: -1 to walk back from here, a batch a probe, 1 to look ahead.
        layout: micro-batches of a probe batch; None takes those of a step, or `curvature.sequences`.
        epochs: passes of a start over these batches.
    """

    def __init__(
        self, context: TrainContext, position: int, direction: int, layout: BatchLayout | None = None, epochs: int = 0
    ) -> None:
        self.batches = context.batches
        self.sequences = context.spec.config.curvature.sequences or self.batches.layout.global_batch
        if layout is not None:
            self.batches = self.batches.divided_as(layout)
            self.sequences = layout.global_batch
        self.reads_the_loss = layout is None and context.spec.config.importance in ("fisher", "hutchinson")
        self.epochs = epochs
        self.context = context
        self.position = position
        self.direction = direction
        self.batches_read = 0
        """Batches of which passes were asked for."""

    @property
    def tokens_read(self) -> int:
        """Tokens of all batches that were read, over all ranks."""
        return self.batches_read * self.sequences * self.context.spec.arguments.seq_length

    def passes(self, batch: int) -> list[Closure]:
        """Return closures that compute the loss of this rank's micro-batches of a probe batch."""
        self.batches_read = max(self.batches_read, batch + 1)
        # A start compares hidden states, and Wanda and SparseGPT measure inputs, also where no token is trained on.
        if self.reads_the_loss and self.position == 0:
            self.batches.require_trained(self._sequences(batch))
        return [partial(self._loss, micro_batch) for micro_batch in self._micro_batches(batch)]

    def divisor(self, batch: int) -> float | None:
        """Return the divisor of each micro-batch's sum over tokens; None where its loss is a plain mean."""
        return self._micro_batches(batch)[0].trained

    def _sequences(self, batch: int) -> range:
        size = self.sequences
        first = max(0, self.position + size * (batch if self.direction > 0 else -1 - batch))
        sequences = range(first, first + size)
        # A run that has begun had trained tokens in its first step.
        is_empty = self.reads_the_loss and self.position > 0 and self.batches.count_trained(sequences) == 0
        return range(size) if is_empty else sequences

    def _micro_batches(self, batch: int) -> list[MicroBatch]:
        return self.batches.micro_batches(self._sequences(batch), with_logits=False)

    def _loss(self, batch: MicroBatch) -> Tensor:
        return self.context.objective.cross_entropy(batch.to(self.context.device))


def _block_start_batches(context: TrainContext) -> RunProbeBatches:
    """Return the text that `forge.start` reads: batches of an Adam step of a block, or of a step of the run."""
    spec = context.spec
    block_start = spec.config.start
    if block_start is None:
        return RunProbeBatches(context, 0, 1)
    layout = context.batches.layout
    tokens = block_start.tokens_of(spec.config.max_steps * spec.tokens_per_step)
    readers = layout.world_size // layout.sequence_parallel
    size, count = block_start.micro_batches(tokens, spec.arguments.seq_length, readers, layout.micro_batch)
    epochs = block_start.passes(tokens, spec.arguments.seq_length, readers)
    return RunProbeBatches(context, 0, 1, replace(layout, micro_batch=size, accumulation=count), epochs)


def log_masks(context: TrainContext, monitor: Monitor, step: int) -> None:
    """Log histograms and the soft-to-hard gap, each at its own interval since it costs time. Collective."""
    intervals = context.spec.config.monitor
    if intervals.histograms_every and step % intervals.histograms_every == 0:
        monitor.histograms(step, context.forge.histograms())
    # Before their first update soft masks keep everything, and hardened ones too.
    has_moved = context.forge.config.soft is None or step >= context.forge.schedule.update_every
    if intervals.gap_every and step % intervals.gap_every == 0 and has_moved:
        # Measure on the newest sequences that were read: a stream may have no more.
        position = context.batches.position
        newest = range(position - context.batches.layout.sequences_at_once, position)
        (batch,) = context.batches.micro_batches(newest, with_logits=False)
        batch = batch.to(context.device)
        gap = context.forge.soft_to_hard_gap(lambda: context.objective.cross_entropy(batch))
        monitor.write(step, {"mask/soft_to_hard_gap": gap})
