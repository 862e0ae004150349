"""SparseForge inside transformers' `Trainer`, and inside its subclasses, such as TRL's `SFTTrainer`.

    from sparseforge_ds.integrations.transformers import SparseForgeMixin, SparseForgeTrainer

    class SparseForgeSFTTrainer(SparseForgeMixin, SFTTrainer): ...

Everything around a step stays the trainer's own. The mixin puts the param groups into its optimizer, attaches the forge
when its engine is there and no checkpoint is loaded yet, steps the forge after the engine, and computes the loss where
there is a teacher. Checkpoints need nothing: the engine's own carry the forge's state (`zero.engine_checkpoints`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DummyOptim
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.data.micro_batch import MicroBatch
from sparseforge_ds.extension_locks import clear_before_training
from sparseforge_ds.forge import SparseForge
from sparseforge_ds.integrations.trainer_batches import (
    LabelWatch,
    StartBatches,
    StepBatches,
    has_plain_examples,
    trained_tokens,
    trainer_micro_batch,
)
from sparseforge_ds.integrations.trainer_saving import SavingMixin
from sparseforge_ds.integrations.trainer_settings import (
    check_teacher,
    intact_checkpoint,
    let_ranks_share_sequences,
    refuse_arguments,
    refuse_block_start,
    refuse_generation_config,
    refuse_length,
    refuse_settings,
    resolve_block,
    scheduled_steps,
)
from sparseforge_ds.model.families import check_prunable
from sparseforge_ds.model.low_rank import prepare
from sparseforge_ds.model.param_groups import param_groups
from sparseforge_ds.model.sound_weights import require_finite_weights
from sparseforge_ds.model.task_head import TaskHead, require_task_head, task_head
from sparseforge_ds.model.teacher import Teacher
from sparseforge_ds.train.monitoring import dial_scalars
from sparseforge_ds.train.objective import LOSSES, Objective

_LOG = logging.getLogger(__name__)
clear_before_training()  # at import, because TrainingArguments already start DeepSpeed, which compiles


class SparseForgeMixin(SavingMixin):
    """Mixin that stands before a trainer's class, and takes two more arguments by keyword.

    Args:
        *args: arguments of the trainer.
        sparseforge: the `sparseforge` block, parsed or not; None takes that of the DeepSpeed JSON. Its `max_steps` is
            the trainer's own, given or computed from epochs.
        teacher: the dense model, as a folder, a hub id or a model. With it, the loss is that of `config.distillation`;
            without it, the trainer's own.
        **kwargs: keyword arguments of the trainer.

    Raises:
        ValueError: a setting cannot go with a mask; the message says what to change.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        sparseforge: SparseForgeConfig | dict[str, Any] | None = None,
        teacher: str | Path | PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> None:
        # State of the training; `train` fills it.
        self.forge = None
        self._objective: Objective | None = None
        """Loss with a teacher."""
        self._label_watch = LabelWatch()
        self._task: Objective | None = None
        """Task loss that probes of the curvature take."""
        self._items: tuple[Any, float] = (None, 0.0)
        """The newest step's `num_items_in_batch`, and the same as a float."""
        self._step_inputs: Sequence[dict[str, Any]] = ()
        self._trained_inputs: list[dict[str, Any]] = []
        """Micro-batches of the step that were trained on, as the loss was given them; kept for probes alone."""
        self._is_in_step = False
        self._num_items: Any = None
        """`num_items_in_batch` of the micro-batch that is trained on."""
        self._is_divisor_told = False
        """True once `_tell_divisor` was called for this micro-batch, even if its inputs told nothing."""
        self._is_loss_ours = False
        """True if this micro-batch's loss went through `compute_loss` here."""
        self._updated = False
        self._resumed: str | Path | bool | None = None
        """Checkpoint from which `train` goes on."""
        # Make the trainer between two checks, and check model and teacher against the block.
        refuse_arguments(kwargs)
        super().__init__(*args, **kwargs)
        refuse_settings(self, teacher, super().compute_loss)
        self._teacher = teacher
        self._config = resolve_block(self, sparseforge, teacher is not None)
        if self.model is not None:
            check_prunable(self.model, self._config)
        if teacher is not None:
            if self.model is not None:
                check_teacher(teacher, self.model, self._config, self.processing_class)
            # The loss with a teacher is a mean, which the trainer divides by the accumulation steps.
            self.loss_is_scaled_for_ga = False
        self._parts = torch.zeros(len(LOSSES) + 1)
        """Sums of the parts of the loss since the last log, and the number of micro-batches in them."""

    # -- before the first step ----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, once, and make the masks final.

        Raises:
            ValueError: it was called before, the trainer has evaluated, there is no such checkpoint, or a start would
                take the examples of a train set that can be read once.
            ForgeError: all steps are done, and masks are not frozen.
            DivergedError: weights are infinite or NaN; the message names the checkpoint to go back to.
        """
        if self.forge is not None:
            raise ValueError(
                "train() was called before, and masks have moved since: make a new trainer, and give "
                "resume_from_checkpoint to go on where this one is"
            )
        if self.deepspeed is not None:
            raise ValueError(
                "this trainer has an engine already, as evaluate() and predict() make one before train(), without an "
                "optimizer: make a new trainer, and evaluate after its training or in another one"
            )
        self._resumed = intact_checkpoint(resume_from_checkpoint, self.args.output_dir)
        refuse_block_start(self, self._config, bool(self._resumed))
        try:
            result = super().train(self._resumed, *args, **kwargs)
        finally:
            if self.forge is not None:
                self.forge.close()
        # A trainer may stop early, by a callback or its own limits.
        assert self.forge is not None
        self._require_finite()
        if self.state.global_step >= self.state.max_steps:
            self.forge.finish()
        elif not self._frozen and self.accelerator.is_main_process:
            _LOG.warning(
                "training was stopped at step %d of %d, before masks are frozen at step %d: the weights are not sparse "
                "yet; `sparseforge consolidate` of a checkpoint projects them as they are",
                self.state.global_step,
                self.state.max_steps,
                self.forge.schedule.freeze_step,
            )
        return result

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the trainer's optimizer over the param groups of a forge. The number of steps is known by now."""
        if self.optimizer is not None and not isinstance(self.optimizer, DummyOptim):
            return self.optimizer
        # Prepare the model for its schedule.
        steps = scheduled_steps(self._resumed, self.state.max_steps)
        if steps < self.state.max_steps:
            _LOG.info("a run of %d steps, whose masks are frozen, goes on to %d", steps, self.state.max_steps)
        self._config = dataclasses.replace(self._config, max_steps=steps)
        refuse_length(self, self._config)
        refuse_generation_config(self.model)
        require_finite_weights(self.model, self.model.name_or_path or type(self.model).__name__)
        prepare(self.model, self._config)
        # Hand the param groups to the optimizer of the DeepSpeed JSON, or make the trainer's own.
        params = param_groups(self.model, self._config, weight_decay=self.args.weight_decay)
        if self.optimizer is not None:
            self.optimizer.params = params
        else:
            from_arguments = self.optimizer_cls_and_kwargs
            optimizer_class, options = from_arguments or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = optimizer_class(params, **options)
        return self.optimizer

    @property
    def deepspeed(self) -> Any:
        """Return the engine.

        A trainer assigns it after `accelerator.prepare` and before it loads a checkpoint, and has no callback there.
        The setter is the moment to attach the forge.
        """
        return self.__dict__.get("_engine")

    @deepspeed.setter
    def deepspeed(self, engine: Any) -> None:
        self.__dict__["_engine"] = engine
        if engine is not None and self.is_in_train:
            self._attach(engine)

    def _attach(self, engine: Any) -> None:
        """Attach a forge to the engine, and load the teacher."""
        config = self._config
        self.forge = SparseForge(engine, config)
        _LOG.info("%s in %d weights: %s", config.pattern, self.forge.coverage.weights, self.forge.coverage)

        # Try once how the logits of the task loss are made.
        token_BS = torch.zeros(self.args.per_device_train_batch_size, 1, dtype=torch.long, device=self.args.device)
        more = {"decoder_input_ids": token_BS} if task_head(self.model) is TaskHead.DECODER else {}
        if self.forge.needs_probe:
            require_task_head(self.model, '"curvature": {"source": "probe"}')
            self._task = Objective(engine, None, config)
            self._task.why_whole_logits(token_BS, **more)
        self._parts = self._parts.to(self.args.device)

        # Load the teacher, and try the same with both models.
        if self._teacher is None or config.distillation is None:
            return
        if isinstance(self._teacher, PreTrainedModel):
            teacher = Teacher(self._teacher, config.distillation, engine.config)
        else:
            # A model of `model_init` was not there before.
            check_teacher(self._teacher, self.model, config, self.processing_class)
            is_causal = task_head(self.model) is TaskHead.NEXT_TOKEN
            options = {} if is_causal else {"model_class": type(self.model)}
            teacher = Teacher.from_pretrained(self._teacher, config.distillation, engine.config, **options)
        if self.get_sp_size() > 1:
            let_ranks_share_sequences(teacher.model, self.model)
        self._objective = Objective(engine, teacher, config)
        if reason := self._objective.why_whole_logits(token_BS, **more):
            _LOG.info("whole logits of both models, which take more memory than blocks of them: %s", reason)

    # -- a step -------------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the trainer does.

        Raises:
            ValueError: there is no engine yet, and transformers makes one for evaluation at ZeRO-3 alone.
        """
        stage = self.accelerator.state.deepspeed_plugin.zero_stage
        if self.deepspeed is None and stage < 3:
            raise ValueError(
                f"evaluate() or predict() before train() at ZeRO-{stage}, where transformers has no engine for it: "
                "eval_on_start=True evaluates before the first step; or evaluate in a Trainer without DeepSpeed"
            )
        return super().evaluation_loop(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's samples; remember the micro-batches of the step for probes of the curvature."""
        # After a resume at the last step within an epoch, transformers would make a step before it checks max_steps.
        if self.state.global_step >= self.state.max_steps:
            return [], None
        samples = super().get_batch_samples(*args, **kwargs)
        self._step_inputs = samples[0]
        self._trained_inputs = []
        # With a teacher the loss is that of labels. Ranks that share their number agree about it.
        is_shared = self.args.average_tokens_across_devices or self.accelerator.num_processes == 1
        if self._objective is not None and samples[1] is not None and is_shared:
            self._label_watch.add_step(samples[1])
        return samples

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError where a trainer stands before the mixin, whose methods it would hide."""
        from transformers import Trainer

        super().__init_subclass__(**kwargs)
        bases_before = cls.__mro__[1 : cls.__mro__.index(SparseForgeMixin)]
        if Trainer in bases_before:
            name = bases_before[0].__name__
            raise TypeError(
                f"{cls.__name__}: SparseForgeMixin must stand before {name}, as in class "
                f"{cls.__name__}(SparseForgeMixin, {name})"
            )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the trainer's step, which ends in the engine's, and then the forge's.

        Raises:
            ValueError: a `compute_loss` of the class leaves out the one here, and with it the teacher.
        """
        assert self.forge is not None
        if not self.forge.ready:
            self.model.train()  # as the trainer's step does; ranks share sequences in this mode only
            self.forge.start(self._start_batches())
        self._num_items = num_items_in_batch
        self._is_divisor_told = False
        self._is_loss_ours = False
        self._is_in_step = True
        try:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._is_in_step = False
        if self._objective is not None and not self._is_loss_ours:
            raise ValueError(
                f"{type(self).__name__}.compute_loss does not call super().compute_loss, so the teacher takes no part: "
                "call it, or leave the teacher out"
            )
        self._updated |= self.forge.step(self._step_batches())
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare inputs as the trainer does; in a training step, tell the forge the divisor of their loss.

        A `compute_loss` of the class may never reach the one here.
        """
        prepared = super()._prepare_inputs(inputs)
        if self._is_in_step and isinstance(prepared, Mapping):  # a collator's BatchEncoding is no dict
            self._tell_divisor(dict(prepared), self._num_items)
        return prepared

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss with the teacher while training; without one, and in evaluation, the trainer's own."""
        if self.forge is None or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._is_loss_ours = True
        if self._task is not None:
            self._trained_inputs.append(dict(inputs))  # a copy, because a loss may take the labels out
        if not self._is_divisor_told or self.get_sp_size() == 1:  # a `compute_loss` of the class may change labels
            self._tell_divisor(inputs, num_items_in_batch)
        if self._objective is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.get_sp_size() > 1:
            trained: float | None = self._divisor_of_shared_sequences(inputs)
        else:
            trained = self._trained_tokens(num_items_in_batch)
            if trained is not None:
                trained /= self.current_gradient_accumulation_steps
        return self._distilled_loss(trainer_micro_batch(inputs, trained, self.model), return_outputs)

    def _distilled_loss(self, batch: MicroBatch, return_outputs: bool) -> Any:
        """Return the loss with the teacher, and add its parts to those of the log."""
        assert self._objective is not None and self.forge is not None
        with self._objective.targets([batch]) as (target,):
            total, parts = self._objective.loss(batch, target, self.forge.step_count / self._config.max_steps)
        self._parts += torch.cat([parts, parts.new_ones(1)])
        return (total, None) if return_outputs else total

    def _trained_tokens(self, num_items_in_batch: Any) -> float | None:
        """Return the trained tokens of the step, per rank over which the engine averages gradients."""
        if num_items_in_batch is None:
            return None
        if self._items[0] is not num_items_in_batch:  # reading it waits for the device: once a step
            self._items = num_items_in_batch, max(1.0, float(num_items_in_batch))
        return self._items[1] / (self.accelerator.num_processes if self.args.average_tokens_across_devices else 1)

    def _tell_divisor(self, inputs: dict[str, Any], num_items_in_batch: Any) -> None:
        """Tell the forge the divisor of this micro-batch's loss, if the curvature is measured in the step itself."""
        assert self.forge is not None
        self._is_divisor_told = True
        if not self._config.measures_in_step(self.forge.step_count + 1):
            return
        tokens = trained_tokens(inputs, self.model)
        if tokens is None:
            return
        # TRL's trainers count the tokens of their completions, and put the number among the inputs.
        trained = self._trained_tokens(inputs.get("num_items_in_batch", num_items_in_batch))
        micro_batches = self.current_gradient_accumulation_steps
        is_mean_of_micro_batch = self._objective is None and self.loss_is_scaled_for_ga is False
        if self.get_sp_size() > 1:
            trained = self._divisor_of_shared_sequences(inputs) * micro_batches
        elif trained is None or is_mean_of_micro_batch:  # which the trainer divides by the number of micro-batches
            trained = float(tokens) * micro_batches
        self.forge.loss_divided_by(trained / self.deepspeed.gradient_accumulation_steps(), micro_batches)

    def _divisor_of_shared_sequences(self, inputs: dict[str, Any]) -> float:
        """Return the divisor of one sequence-parallel rank's loss. Collective over the ranks that share sequences.

        With it, the mean of the losses over these ranks is the micro-batch's mean.
        """
        trained = (inputs["shift_labels"] != -100).sum()
        torch.distributed.all_reduce(trained, group=self.deepspeed.seq_parallel_group)
        return max(1, int(trained)) / self.get_sp_size()

    def _start_batches(self) -> StartBatches | StepBatches:
        """Return the batches that `forge.start` reads.

        They are examples of the train set. Where no block is trained, and the set cannot be read beside the trainer's
        loader, they are those of the first step.
        """
        block_start = self._config.block_start
        if self._task is None or (block_start is None and not has_plain_examples(self)):
            return self._step_batches()
        return StartBatches(self, block_start, self._task)

    def _step_batches(self) -> StepBatches:
        return StepBatches(self._step_inputs, self._prepare_inputs, self._task, self._trained_inputs)

    # -- logging, and the choice of the best checkpoint ----------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the trainer does, with the parts of the loss, the annealed numbers, and metrics of moved masks."""
        if self.forge is not None and "loss" in logs:
            *sums, count = self.accelerator.reduce(self._parts, "mean").tolist()
            parts = dict(zip(LOSSES, sums, strict=True))
            if count:
                logs |= {f"loss/{name}": value / count for name, value in parts.items() if value or name == "kl"}
            self._parts.zero_()
            logs |= dial_scalars(self.forge.dials)
            if self._updated:
                logs |= self.forge.metrics
            self._updated = False
        super().log(logs, *args, **kwargs)

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the newest metric is the best; False before the model is as sparse as its export."""
        is_comparable = self.forge is not None and self._config.is_comparable(self.forge.step_count)
        return super()._determine_best_metric(*args, **kwargs) if self._frozen and is_comparable else False


class SparseForgeTrainer(SparseForgeMixin, Trainer):
    """A `transformers.Trainer` that trains a mask beside the weights; it takes the mixin's arguments too."""
