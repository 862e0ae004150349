"""Settings of transformers' trainers: those that a mask needs, and those that cannot go with one."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint

from sparseforge_ds.checkpoint.folder import is_complete_trainer_checkpoint, newest_trainer_checkpoint
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.run_state import RunState
from sparseforge_ds.integrations.trainer_batches import is_read_once
from sparseforge_ds.model.distill import check_same_vocabulary
from sparseforge_ds.model.hidden import check_same_states
from sparseforge_ds.model.low_rank import would_lose
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.model.task_head import TaskHead, check_same_classes, is_classification, require_task_head, task_head
from sparseforge_ds.model.tokenizer import check_same_tokens, tokenizer_folder
from sparseforge_ds.train.launcher import rank_from_launcher

_LOG = logging.getLogger(__name__)
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "_attn_implementation")
_REPLACED_LOSSES = ("transformers.trainer", "trl.trainer.sft_trainer")
"""Modules whose `compute_loss` is the cross-entropy, in whose place the loss with a teacher can stand."""
_ADAPTER = (
    "PEFT adapters train small matrices beside frozen weights, while a mask is found by training the weights that it "
    "prunes; leave the adapter out, or train it on the sparse model afterwards"
)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Reject arguments before a trainer is made, which may load models and tokenize.

    Raises:
        ValueError: an adapter or an optimizer is among them.
    """
    if arguments.get("peft_config") is not None:
        raise ValueError(f"peft_config: {_ADAPTER}")
    if (arguments.get("optimizers") or (None, None))[0] is not None:
        raise ValueError(
            "optimizers: the weights under a mask need a param group of their own, and this one has groups already; "
            'choose it by "optimizer" in the DeepSpeed JSON, by args.optim, or by optimizer_cls_and_kwargs'
        )


def refuse_settings(
    trainer: Any, teacher: str | Path | PreTrainedModel | None, compute_loss: Callable[..., Any]
) -> None:
    """Reject settings after a trainer was made, and before it trains.

    Args:
        trainer: a `transformers.Trainer`.
        teacher: the teacher of the mixin; with one, the loss is the mixin's.
        compute_loss: the method of the class that the mixin stands before.

    Raises:
        ValueError: a setting cannot go with a mask, or with a teacher.
    """
    # Ranks that transformers does not know of.
    args = trainer.args
    model = trainer.model
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and args.world_size == 1:
        raise ValueError(
            f"the launcher has started {launched} ranks, and TrainingArguments know of one, so that every rank would "
            "train alone: without a GPU give use_cpu=True (--use_cpu true)"
        )
    if isinstance(trainer.train_dataset, Sized) and not len(trainer.train_dataset):
        raise ValueError(
            "train_dataset has no example: look at what filters it, and at the length that examples must have"
        )
    # Settings that cannot go with a mask.
    if not trainer.is_deepspeed_enabled:
        raise ValueError(
            f"{type(trainer).__name__} trains on DeepSpeed, which is not set up: give deepspeed=JSON to the training "
            "arguments, or start with accelerate launch --use_deepspeed"
        )
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{type(model).__name__} has a PEFT adapter: {_ADAPTER}")
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size begins anew after it ran out of memory, with weights that masks have moved already; "
            "set per_device_train_batch_size"
        )
    _, settings = trainer.optimizer_cls_and_kwargs or (None, {})
    if taken := {"params", "model", "optimizer_dict"} & settings.keys():
        raise ValueError(
            f"optimizer_cls_and_kwargs: {', '.join(sorted(taken))} would take the place of the param groups that masks "
            "need; leave it out"
        )
    if (parts := trainer.get_sp_size()) > 1 and args.max_grad_norm and _stage_of(trainer) < 3:
        raise ValueError(
            f"parallelism_config.sp_size = {parts} below ZeRO-3: DeepSpeed sums gradients over ranks that share "
            f"sequences there, so that max_grad_norm = {args.max_grad_norm:g} would clip {parts} times as hard; use "
            "ZeRO-3, or max_grad_norm=0"
        )

    # Settings that cannot go with a teacher, since they make another loss.
    if teacher is None:
        return
    if not isinstance(teacher, str | Path | PreTrainedModel):
        raise ValueError(
            f"teacher is {type(teacher).__name__}, no model of transformers; give a folder, a hub id or such a model. "
            "Merge an adapter into it first, by merge_and_unload()"
        )
    if teacher is model:
        raise ValueError(
            "teacher is the model that is trained; give the dense model once more, as a folder, a hub id or a copy"
        )
    losses = {
        compute_loss.__qualname__: compute_loss.__module__ not in _REPLACED_LOSSES,
        "ref_model": getattr(trainer, "ref_model", None) is not None,
        "compute_loss_func": trainer.compute_loss_func is not None,
        "label_smoothing_factor": bool(args.label_smoothing_factor),
        "use_liger_kernel": args.use_liger_kernel,
        f"loss_type {getattr(args, 'loss_type', None)!r}": getattr(args, "loss_type", None) not in (None, "nll"),
    }
    if other_loss := next((name for name, is_set in losses.items() if is_set), None):
        raise ValueError(
            f"{other_loss} is another loss than the teacher's, and only one can be trained on; leave it out, or teacher"
        )


def refuse_generation_config(model: Any) -> None:
    """Reject a generation config that no save takes: the first one would fail, hours from here.

    transformers saves an unchanged config even if it contradicts itself, so that one passes. The trainer changes ids of
    special tokens when training begins: call this after it.

    Raises:
        ValueError: the config contradicts itself, and is not as it was read.
    """
    config = getattr(model, "generation_config", None)
    if config is None or not model.can_generate():
        return
    try:
        config.validate(strict=getattr(config, "_original_object_hash", None) != hash(config))
    except ValueError as error:
        raise ValueError(
            f"model.generation_config cannot be saved, and so no checkpoint: {error}; correct it, or its file "
            "generation_config.json, before the trainer is made"
        ) from None


def intact_checkpoint(resume: str | Path | bool | None, output: str | Path) -> str | Path | bool | None:
    """Return the checkpoint from which a trainer goes on, which it can load.

    Args:
        resume: `resume_from_checkpoint`; True takes the newest intact one, as the last may be left from a killed save.
        output: the trainer's output folder.

    Raises:
        ValueError: there is no intact checkpoint.
    """
    # True: fall back on the newest one that is intact.
    if resume is True and (last := get_last_checkpoint(str(output))) is not None:
        if is_complete_trainer_checkpoint(Path(last)):
            return last
        if (newest := newest_trainer_checkpoint(Path(output))) is None:
            raise ValueError(f"resume_from_checkpoint True: {last} is not whole, and no other one in {output} is")
        if not rank_from_launcher():
            _LOG.warning("%s is not whole, as when a save was interrupted; training goes on from %s", last, newest)
        return str(newest)
    if resume is None or isinstance(resume, bool) or is_complete_trainer_checkpoint(Path(resume)):
        return resume

    # A path that cannot be loaded: name the newest intact checkpoint in it, beside it, or in the output folder.
    why = "is not whole, or no checkpoint of a Trainer" if Path(resume).is_dir() else "no such folder"
    folders = (Path(resume), Path(resume).parent, Path(output))
    newest = next(filter(None, map(newest_trainer_checkpoint, folders)), None)
    cure = f"the newest that is whole is {newest}" if newest else f"there is none that is whole in {output} either"
    raise ValueError(f"resume_from_checkpoint {resume}: {why}; {cure}")


def cure_of_divergence(output: str | Path) -> str:
    """Return advice for a diverged run: the checkpoint in its output folder to go back to, or a new beginning."""
    newest = newest_trainer_checkpoint(Path(output))
    restart = "begin again" if newest is None else f"go back to {newest} by resume_from_checkpoint"
    return f"{restart}, with a lower learning rate"


def scheduled_steps(checkpoint: str | Path | bool | None, steps: int) -> int:
    """Return the number of steps that the schedules of a trainer's masks are made for.

    Args:
        checkpoint: the result of `intact_checkpoint`.
        steps: the trainer's own number of steps.

    Returns:
        The saved run's number if its masks are frozen and `steps` makes it longer; otherwise `steps`.

    Raises:
        ValueError: the checkpoint is damaged, has no masks, or is of a later step.
    """
    if checkpoint is None or isinstance(checkpoint, bool):
        return steps
    saved = RunState.parse(Checkpoint(checkpoint).client_state.get("sparseforge"), str(checkpoint))
    if saved.step > steps:
        raise ValueError(
            f"{checkpoint} is at step {saved.step} already, and the trainer makes {steps}: give a larger max_steps or "
            "more epochs to go on, or an earlier checkpoint to go back"
        )
    is_frozen = saved.step >= saved.config.release_step
    return min(saved.config.max_steps, steps) if is_frozen else steps


def refuse_length(trainer: Any, config: SparseForgeConfig) -> None:
    """Reject a number of steps, once it is known and before the first one.

    Args:
        trainer: a `transformers.Trainer`.
        config: the sparseforge block with the trainer's `max_steps`.

    Raises:
        ValueError: masks would never move, or not be frozen at the last step.
    """
    config.check_length()
    if trainer.args.fp16 and config.release_step >= config.max_steps:
        raise ValueError(
            f"fp16 with masks that are frozen at the last step, {config.release_step} of {config.max_steps}: the "
            "trainer counts steps that fp16 skips, so that the run would end before the masks freeze; use bf16, or a "
            "method that freezes them earlier"
        )


def check_teacher(
    teacher: str | Path | PreTrainedModel, model: Any, config: SparseForgeConfig, processor: Any = None
) -> None:
    """Reject a teacher that cannot be compared with the model, before a weight of it is loaded.

    Args:
        teacher: a folder, a hub id, or a model.
        model: that of the trainer.
        config: block of the trainer.
        processor: of the trainer: a tokenizer, something that has one, or None.

    Raises:
        ValueError: there is no such teacher, or it has another head, vocabulary, tokenizer or number of classes. Where
            hidden states are compared, also one with other states or another order of channels.
    """
    # The heads must be of one kind.
    head = require_task_head(model, "teacher")
    if isinstance(teacher, PreTrainedModel) and (
        task_head(teacher) is not head or is_classification(teacher) != is_classification(model)
    ):
        raise ValueError(
            f"teacher is {type(teacher).__name__} and the model {type(model).__name__}: their logits are of different "
            "things; give a teacher with the same head"
        )

    # Logits must be of the same tokens or classes.
    if isinstance(teacher, PreTrainedModel):
        teacher_config = teacher.config
    else:
        teacher_config = load_config(teacher, f"teacher {teacher}")
    check_same_vocabulary(model.config.get_text_config().vocab_size, teacher_config.get_text_config().vocab_size)
    tokenizer = getattr(processor, "tokenizer", processor)
    origin = teacher_config.name_or_path if isinstance(teacher, PreTrainedModel) else str(teacher)
    # A model may have been made in memory, or be called as a folder that is gone.
    is_known = bool(origin) and (Path(origin).is_dir() or not isinstance(teacher, PreTrainedModel))
    folder = tokenizer_folder(origin) if isinstance(tokenizer, PreTrainedTokenizerBase) and is_known else None
    if folder is not None:
        try:
            check_same_tokens(tokenizer, folder)
        except ValueError as error:
            raise ValueError(f"teacher {origin}: {error}") from None
    if head is not TaskHead.NEXT_TOKEN and config.distillation is not None and config.distillation.hidden is not None:
        raise ValueError(
            f"distillation.hidden with {type(model).__name__}: hidden states are compared in causal language models; "
            'set "hidden" to null'
        )
    if is_classification(model):
        check_same_classes(model.config, teacher_config)

    # Hidden states must have the same channels in the same order.
    if config.distillation is not None and config.distillation.hidden is not None:
        folders = Path(model.config.name_or_path), Path(teacher_config.name_or_path)
        check_same_states(model.config, teacher_config, *folders)


def let_ranks_share_sequences(teacher: Any, student: Any) -> None:
    """Put a teacher into training mode, the only one in which accelerate lets ranks share the sequences of a model.

    Args:
        teacher: a causal language model.
        student: another one, whose attention accelerate has divided.

    Raises:
        ValueError: the teacher has dropout, or other heads than those that tokens are exchanged for.
    """
    student_heads, teacher_heads = (
        {name: getattr(model.config.get_text_config(), name, None) for name in _HEADS} for model in (student, teacher)
    )
    if student_heads != teacher_heads:
        raise ValueError(
            f"parallelism_config.sp_size with a teacher of {teacher_heads}, while the model has {student_heads}: "
            "DeepSpeed exchanges tokens for heads of one kind; take a teacher with the same, leave one of the two out, "
            "or train by `sparseforge train --sequence_parallel`"
        )
    # In training mode dropout would act.
    settings = teacher.config.get_text_config().to_dict().items()
    if dropout := {
        name: value for name, value in settings if "drop" in name and isinstance(value, float) and value > 0
    }:
        raise ValueError(
            f"parallelism_config.sp_size with a teacher whose config.json has {dropout}: accelerate lets ranks share "
            "sequences in training mode alone, where the teacher would drop values; set them to 0.0"
        )
    teacher.train()


def _are_equal(block: SparseForgeConfig | dict[str, Any] | None, in_json: Any) -> bool:
    """Return True if the block that a user gives says what that of the JSON says, which may be wrong."""
    if block is None or block == in_json:
        return True
    if not isinstance(in_json, dict):
        return False
    config = SparseForgeConfig.from_dict(block) if isinstance(block, dict) else block
    try:
        return config == SparseForgeConfig.from_dict(in_json)
    except ValueError:
        return False


def refuse_block_start(trainer: Any, config: SparseForgeConfig, resumes: bool) -> None:
    """Raise ValueError if the start of a run cannot read what it needs of a trainer's set."""
    if config.block_start is None:
        return
    key, cure = ("importance", '"fisher"') if config.start is None else ("start", "null")
    if (parts := trainer.get_sp_size()) > 1:
        raise ValueError(
            f"sparseforge.{key} reads whole sequences, and parallelism_config.sp_size = {parts} ranks share one; "
            f'train with the launcher, or set "{key}" to {cure}'
        )
    if not resumes and is_read_once(trainer.train_dataset):
        raise ValueError(
            f"sparseforge.{key} reads examples of train_dataset before the first step, and training would miss "
            f'them: this set can be read once; give one whose iter() begins anew, or set "{key}" to {cure}'
        )


def resolve_block(
    trainer: Any, user_block: SparseForgeConfig | dict[str, Any] | None, teacher: bool
) -> SparseForgeConfig:
    """Return the sparseforge block of a trainer; its number of steps is not known yet.

    Args:
        trainer: a `transformers.Trainer` with DeepSpeed.
        user_block: the block that the user gives; None takes that of the DeepSpeed JSON.
        teacher: True if there is a teacher.

    Raises:
        ValueError: there is no block, it is wrong, or distillation and teacher do not go together.
    """
    # Find the block.
    if not isinstance(user_block, SparseForgeConfig | dict | None):
        raise ValueError(f"sparseforge = {user_block!r}: give the block itself, as a dict or a SparseForgeConfig")
    block: Any = user_block
    in_json = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config.get("sparseforge")
    if trainer.accelerator.is_main_process and in_json is not None and not _are_equal(block, in_json):
        _LOG.warning('sparseforge= is taken, and the "sparseforge" block of the DeepSpeed JSON is not')
    if block is None:
        block = in_json
        if not isinstance(block, dict):
            raise ValueError('the DeepSpeed JSON has no "sparseforge" block; add "sparseforge": {} for the defaults')

    # Distillation needs a teacher. It is on by default, and without a teacher it is off.
    if isinstance(block, dict):
        if not teacher and block.get("distillation") is not None:
            raise ValueError(
                "sparseforge.distillation is set, and there is no teacher: give teacher= to the trainer, or leave "
                "distillation out"
            )
        override = {} if teacher else {"distillation": None}
        block = SparseForgeConfig.from_dict({**block, **override})
    if teacher and block.distillation is None:
        raise ValueError("sparseforge.distillation is null, and there is a teacher: leave one of the two out")
    if not teacher and block.distillation is not None:
        block = dataclasses.replace(block, distillation=None)

    # Some settings belong to `sparseforge train`.
    if block.curvature.sequences is not None:
        raise ValueError(
            f"sparseforge.curvature.sequences = {block.curvature.sequences}: under a trainer, the curvature is "
            "measured on the micro-batches of the step; leave it out"
        )
    for name in ("push_to_hub", "save_only_model"):
        if block.added_to_layers is not None and getattr(trainer.args, name):
            raise ValueError(f"{name}: {would_lose(block.added_to_layers)}; leave {name} out")
    if block.monitor.histograms_every or block.monitor.gap_every:
        raise ValueError("sparseforge.monitor: histograms_every and gap_every are the launcher's; leave them out")
    return block


def _stage_of(trainer: Any) -> int:
    return int(trainer.accelerator.state.deepspeed_plugin.zero_stage)
