"""SparseForge inside transformers' `Trainer`, and inside what is derived from it, such as TRL's `SFTTrainer`.

    from sparseforge_ds.integrations.transformers import SparseForgeMixin, SparseForgeTrainer

    class SparseForgeSFTTrainer(SparseForgeMixin, SFTTrainer): ...

What a trainer does around a step stays its own. The mixin puts the param groups into its optimizer, attaches the forge
when its engine is there and no checkpoint is loaded yet, steps the forge after the engine, and forms the loss where
there is a teacher. Checkpoints need nothing: the engine's own carry the forge's state (`zero.engine_checkpoints`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DummyOptim
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from sparseforge_ds.config import SparseForgeConfig, StartConfig
from sparseforge_ds.data.micro_batch import MicroBatch
from sparseforge_ds.extension_locks import clear_before_training
from sparseforge_ds.forge import SparseForge
from sparseforge_ds.integrations.step_text import StartText, StepText, micro_batch_of, trained_tokens
from sparseforge_ds.integrations.trainer_settings import (
    WITHOUT_BRANCHES,
    block_of,
    check_teacher,
    refuse_arguments,
    refuse_length,
    refuse_settings,
    scheduled_steps,
    share_sequences,
    way_back,
    whole_checkpoint,
)
from sparseforge_ds.model.basis import keep_basis
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.model.groups import param_groups
from sparseforge_ds.model.low_rank import prepare
from sparseforge_ds.model.sound_weights import require_finite_weights
from sparseforge_ds.model.task_head import TaskHead, require_task_head, task_head
from sparseforge_ds.model.teacher import Teacher
from sparseforge_ds.train.monitoring import dial_scalars
from sparseforge_ds.train.objective import LOSSES, Objective

_LOG = logging.getLogger(__name__)
clear_before_training()  # at import, because TrainingArguments already start DeepSpeed, which compiles
if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class SparseForgeMixin(_Trainer):
    """Stands before a trainer's class, and takes two more arguments by keyword.

    Args:
        *args: of the trainer.
        sparseforge: the `sparseforge` block, parsed or not; None for that of the DeepSpeed JSON. Its `max_steps` is the
            trainer's own, whether that is given or follows from epochs.
        teacher: the dense model, as a folder, a hub id or a model; with it the loss is `config.distillation`'s, without
            it the trainer's own.
        **kwargs: of the trainer.

    Raises:
        ValueError: something cannot be trained so, with the setting to change.
    """

    forge: SparseForge | None
    """None until `train` has an engine."""
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        sparseforge: SparseForgeConfig | dict[str, Any] | None = None,
        teacher: str | Path | PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> None:
        self.forge = None
        self._objective: Objective | None = None
        self._task: Objective | None = None
        self._items: tuple[Any, float] = (None, 0.0)
        """What a step said last of how many tokens it trains on, and that as a number."""
        self._step_inputs: Sequence[dict[str, Any]] = ()
        self._trained_inputs: list[dict[str, Any]] = []
        """Micro-batches of the step that were trained on, as the loss was given them; kept for probes alone."""
        self._updated = False
        self._resumed: str | Path | bool | None = None
        """Checkpoint from which `train` goes on."""
        refuse_arguments(kwargs)
        super().__init__(*args, **kwargs)
        refuse_settings(self, teacher)
        self._teacher = teacher
        self._config = block_of(self, sparseforge, teacher is not None)
        if self.model is not None:
            prunable_weights(self.model, self._config)
        if teacher is not None:
            if self.model is not None:
                check_teacher(teacher, self.model, self._config)
            self.loss_is_scaled_for_ga = False  # ours is a mean; the trainer divides it by the accumulation steps
        self._parts = torch.zeros(len(LOSSES) + 1)
        """Sums of the parts of the loss since the last log, and over how many micro-batches."""

    # -- before the first step ----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, once.

        Raises:
            ValueError: it was called before, or there is no such checkpoint.
            ForgeError: all steps are made, and masks are not frozen; as DivergedError where weights are infinite or
                NaN, with the checkpoint to go back to.
        """
        if self.forge is not None:
            raise ValueError(
                "train() was called before, and masks have moved since: make a new trainer, and give "
                "resume_from_checkpoint to go on where this one is"
            )
        self._resumed = resume_from_checkpoint = whole_checkpoint(resume_from_checkpoint, self.args.output_dir)
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        assert self.forge is not None
        self._require_finite()
        if self.state.global_step >= self.state.max_steps:
            self.forge.finish()
        elif not self._frozen:
            _LOG.warning(
                "training was stopped at step %d of %d, before masks are frozen at step %d: the weights are not sparse "
                "yet; `sparseforge consolidate` of a checkpoint projects them as they are",
                self.state.global_step,
                self.state.max_steps,
                self.forge.schedule.freeze_step,
            )
        return result

    def create_optimizer(self, model: Any = None) -> Any:
        """The trainer's optimizer, over our param groups. The number of steps is known by now."""
        if self.optimizer is not None and not isinstance(self.optimizer, DummyOptim):
            return self.optimizer
        steps = scheduled_steps(self._resumed, self.state.max_steps)
        if steps < self.state.max_steps:
            _LOG.info("a run of %d steps, whose masks are frozen, goes on to %d", steps, self.state.max_steps)
        self._config = dataclasses.replace(self._config, max_steps=steps)
        refuse_length(self, self._config)
        require_finite_weights(self.model, self.model.name_or_path or type(self.model).__name__)
        prepare(self.model, self._config)
        groups = param_groups(self.model, self._config, weight_decay=self.args.weight_decay)
        if self.optimizer is not None:  # the DeepSpeed JSON has one
            self.optimizer.params = groups
        else:
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = chosen[0](groups, **chosen[1])
        return self.optimizer

    @property
    def deepspeed(self) -> Any:
        """The engine. A trainer assigns it after `accelerator.prepare` and before it loads a checkpoint, and tells
        nobody: this is the moment to attach."""
        return self.__dict__.get("_engine")

    @deepspeed.setter
    def deepspeed(self, engine: Any) -> None:
        self.__dict__["_engine"] = engine
        if engine is not None and self.is_in_train:
            self._attach(engine)

    def _attach(self, engine: Any) -> None:
        config = self._config
        if config.start is not None and (parts := self.get_sp_size()) > 1:
            raise ValueError(
                f"sparseforge.start reads whole sequences, and parallelism_config.sp_size = {parts} ranks share one; "
                'train with the launcher, or set "start" to null'
            )
        self.forge = SparseForge(engine, config)
        _LOG.info("%s in %d weights: %s", config.pattern, self.forge.coverage.weights, self.forge.coverage)
        few = torch.zeros(self.args.per_device_train_batch_size, 1, dtype=torch.long, device=self.args.device)
        more = {"decoder_input_ids": few} if task_head(self.model) is TaskHead.DECODER else {}
        if self.forge.needs_probe:
            require_task_head(self.model, '"curvature": {"source": "probe"}')
            self._task = Objective(engine, None, config)
            self._task.why_whole_logits(few, **more)
        self._parts = self._parts.to(self.args.device)
        if self._teacher is None or config.distillation is None:
            return
        if isinstance(self._teacher, PreTrainedModel):
            teacher = Teacher(self._teacher, config.distillation, engine.config)
        else:
            check_teacher(self._teacher, self.model, config)  # a model of `model_init` was not there before
            causal = task_head(self.model) is TaskHead.NEXT_TOKEN
            kind = {} if causal else {"model_class": type(self.model)}
            teacher = Teacher.from_pretrained(self._teacher, config.distillation, engine.config, **kind)
        if self.get_sp_size() > 1:
            share_sequences(teacher.model, self.model)
        self._objective = Objective(engine, teacher, config)
        if whole := self._objective.why_whole_logits(few, **more):
            _LOG.info("whole logits of both models, which take more memory than blocks of them: %s", whole)

    # -- a step -------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own; remembers the micro-batches of the step for probes of the curvature."""
        samples = super().get_batch_samples(*args, **kwargs)
        self._step_inputs = samples[0]
        self._trained_inputs = []
        return samples

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The trainer's own, which ends in the engine's step; then the forge's."""
        assert self.forge is not None
        if not self.forge.ready:
            self.model.train()  # as the trainer does in its own, and sequences are shared in that mode alone
            self.forge.start(self._step_text() if self._config.start is None else self._start_text(self._config.start))
        loss: Tensor = super().training_step(*args, **kwargs)
        self._updated |= self.forge.step(self._step_text())
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Ours with a teacher, while training; else the trainer's own, in evaluation as well."""
        if self.forge is None or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._task is not None:
            self._trained_inputs.append(dict(inputs))  # a copy, because a loss may take the labels out
        self._tell_divisor(inputs, num_items_in_batch)
        if self._objective is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        trained = self._share(inputs) if self.get_sp_size() > 1 else self._trained(num_items_in_batch)
        if trained is not None and self.get_sp_size() == 1:
            trained /= self.current_gradient_accumulation_steps
        return self._taught(micro_batch_of(inputs, trained, self.model), return_outputs)

    def _taught(self, batch: MicroBatch, return_outputs: bool) -> Any:
        """The teacher's loss."""
        assert self._objective is not None and self.forge is not None
        with self._objective.targets([batch]) as (target,):
            total, parts = self._objective.loss(batch, target, self.forge.step_count / self._config.max_steps)
        self._parts += torch.cat([parts, parts.new_ones(1)])
        return (total, None) if return_outputs else total

    def _trained(self, num_items_in_batch: Any) -> float | None:
        """Tokens of the step that are trained on, per rank over which the engine averages gradients."""
        if num_items_in_batch is None:
            return None
        if self._items[0] is not num_items_in_batch:  # reading it waits for the device: once a step
            self._items = num_items_in_batch, max(1.0, float(num_items_in_batch))
        return self._items[1] / (self.accelerator.num_processes if self.args.average_tokens_across_devices else 1)

    def _tell_divisor(self, inputs: dict[str, Any], num_items_in_batch: Any) -> None:
        """The trainer forms the sum of losses that an engine's mean over micro-batches would be."""
        assert self.forge is not None
        if (
            not self._config.measures_in_step(self.forge.step_count + 1)
            or (tokens := trained_tokens(inputs, self.model)) is None
        ):
            return
        # TRL's trainers count what they have completed, and put it among the inputs.
        trained = self._trained(inputs.get("num_items_in_batch", num_items_in_batch))
        there = self.current_gradient_accumulation_steps
        of_own_mean = self._objective is None and self.loss_is_scaled_for_ga is False
        if self.get_sp_size() > 1:
            trained = self._share(inputs) * there
        elif trained is None or of_own_mean:  # over the micro-batch, which the trainer divides by how many there are
            trained = float(tokens) * there
        self.forge.loss_divided_by(trained / self.deepspeed.gradient_accumulation_steps(), there)

    def _share(self, inputs: dict[str, Any]) -> float:
        """By what each of the ranks that share sequences divides, so that their mean is that of the micro-batch."""
        trained = (inputs["shift_labels"] != -100).sum()
        torch.distributed.all_reduce(trained, group=self.deepspeed.seq_parallel_group)
        return max(1, int(trained)) / self.get_sp_size()

    def _start_text(self, start: StartConfig) -> StartText:
        """Return the text of a start; a step of a block has `start.batch` sequences, or those of a training step."""
        at_once = self.args.per_device_train_batch_size * self.args.world_size
        accumulated = self.args.gradient_accumulation_steps
        per_batch = accumulated if start.batch is None else max(1, round(start.batch / at_once))
        assert self._task is not None
        return StartText(self, per_batch, self._task)

    def _step_text(self) -> StepText:
        return StepText(self._step_inputs, self._prepare_inputs, self._task, self._trained_inputs)

    # -- what is saved and logged, and which checkpoint is the best ----------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The trainer's own, of a model that transformers loads; weights that ZeRO-3 divides are gathered for it.

        Raises:
            ValueError: it has low-rank branches, which transformers would leave out without a word.
        """
        if not _internal_call:
            self._before_publication("save_model")
        with self._gathered_on_save(not _internal_call or self.args.push_to_hub):
            super().save_model(output_dir, _internal_call)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, of a model that transformers loads; raises what `save_model` does."""
        self._before_publication("push_to_hub")
        with self._gathered_on_save(True):
            return super().push_to_hub(*args, **kwargs)

    @contextmanager
    def _gathered_on_save(self, wanted: bool) -> Iterator[None]:
        """Write weights that ZeRO-3 divides whole while active, as "stage3_gather_16bit_weights_on_model_save" of the
        DeepSpeed JSON does; without it a trainer writes none. A checkpoint needs no such copy."""
        engine = self.deepspeed
        if not wanted or engine is None or engine.zero_optimization_stage() < 3:
            yield
            return
        zero = engine._config.zero_config
        before = zero.gather_16bit_weights_on_model_save
        zero.gather_16bit_weights_on_model_save = True
        try:
            yield
        finally:
            zero.gather_16bit_weights_on_model_save = before

    def _before_publication(self, what: str) -> None:
        self._refuse_branches(what)
        if not self._frozen and self.accelerator.is_main_process:
            step = 0 if self.forge is None else self.forge.step_count
            _LOG.warning("%s: masks are not frozen at step %d, and the weights that it writes not sparse", what, step)

    def _refuse_branches(self, what: str) -> None:
        if self._config.low_rank is not None:
            raise ValueError(
                f"{what}: {WITHOUT_BRANCHES}; make it from the newest checkpoint: sparseforge consolidate "
                f"{self.args.output_dir} OUT"
            )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """The trainer's own, which writes the model first and removes older checkpoints last.

        Raises:
            DivergedError: the weights are infinite or NaN; nothing was written, and no checkpoint removed.
        """
        self._require_finite()
        super()._save_checkpoint(*args, **kwargs)

    def _require_finite(self) -> None:
        assert self.forge is not None
        self.forge.require_finite(way_back(self.args.output_dir))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The trainer's own; with what a permuted or rotated model's folder says of it, which its exports need."""
        super()._save(output_dir, state_dict)
        name, folder = self.model.config.name_or_path, Path(output_dir or self.args.output_dir)
        if self.args.should_save and name and Path(name).is_dir():
            keep_basis(Path(name), folder)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The trainer's own, with the parts of the loss, the annealed numbers, and metrics of masks that moved."""
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

    @property
    def _frozen(self) -> bool:
        return self.forge is not None and self.forge.step_count >= self.forge.schedule.freeze_step

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Before masks are frozen a metric is one of a model that is not sparse yet, and no better than a later one."""
        return super()._determine_best_metric(*args, **kwargs) if self._frozen else False


class SparseForgeTrainer(SparseForgeMixin, Trainer):
    """transformers' `Trainer`, which trains a mask beside the weights; its arguments, and those of the mixin."""
