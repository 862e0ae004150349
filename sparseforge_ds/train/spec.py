"""Settings of a run: resolved, and checked for every mistake that shows before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.batch import SEQUENCE, batch_arithmetic, check_probe_batch, sequence_ranks, with_batch
from sparseforge_ds.config.deepspeed_config import read_deepspeed, resolve, training_dtype, zero_stage
from sparseforge_ds.data.held_out import find_held_out
from sparseforge_ds.data.mixture import STREAM, Mixture, find_text
from sparseforge_ds.data.teacher_logits import require_matching_settings
from sparseforge_ds.data.text_files import LocalText, TextOptions, TextSource
from sparseforge_ds.data.tokenization import check_frame, check_trained
from sparseforge_ds.model.any_family import any_family
from sparseforge_ds.model.architecture import Architecture, architecture_of, bare_model
from sparseforge_ds.model.distill import check_same_vocabulary
from sparseforge_ds.model.estimator_support import check_measurable
from sparseforge_ds.model.families import Coverage, PrunableWeight, coverage, prunable_weights, uncovered_weights
from sparseforge_ds.model.hidden import check_same_states
from sparseforge_ds.model.low_rank import prepare
from sparseforge_ds.model.pretrained import (
    Pretrained,
    check_attention,
    check_length,
    check_shapes,
    find_model,
)
from sparseforge_ds.model.tokenizer import check_same_tokens, tokenizer_folder
from sparseforge_ds.start.block_start import check_blocks
from sparseforge_ds.train.document_attention import check_document_attention
from sparseforge_ds.train.memory_settings import MemorySettings, leaf_suffixes, settings
from sparseforge_ds.train.output_location import check_output_location
from sparseforge_ds.train.schedule import LearningRate
from sparseforge_ds.train.tracking import check_trackers


@dataclass(frozen=True)
class Hardware:
    """Abilities of the GPUs of a run."""

    bf16: bool = True
    """True if they compute in bf16 faster than in fp32."""
    fp16: bool = True
    """True if they compute in fp16."""
    fused: bool = True
    """True if an optimizer step is fastest as one kernel."""

    @classmethod
    def here(cls) -> Hardware:
        """Return the abilities of this machine."""
        accelerator = get_accelerator()
        gpu = accelerator.device_name() != "cpu"
        bf16 = gpu and accelerator.is_bf16_supported()
        if accelerator.device_name() == "cuda":  # a V100 or T4 has bf16 as well, slower than fp32
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return cls(bf16, gpu and accelerator.is_fp16_supported(), gpu)


@dataclass(frozen=True)
class RunSpec:
    """The settings of a run, all of them resolved and checked."""

    arguments: RunArguments
    config: SparseForgeConfig
    deepspeed: dict[str, Any]
    """The resolved DeepSpeed configuration."""
    model: Pretrained
    teacher: Pretrained | None
    weights: list[PrunableWeight]
    coverage: Coverage
    uncovered: list[str]
    """Linear weights that nobody has decided about, as lines for people; too few of them to stop."""
    unneeded: tuple[str, ...]
    """Globs of `allow_dense` that allow nothing, as lines for people."""
    has_own_globs: bool
    """True if the user, not `--any_family` alone, says which weights are pruned or stay dense."""
    sizes: Architecture
    """Sizes of the model's parts, for plans of memory."""
    teacher_sizes: Architecture | None
    """Sizes of a teacher that is another model; None otherwise."""
    text: Mixture
    held_out: TextSource | None
    """Text of `--eval_dataset`."""
    steps: int
    """Optimizer steps of the whole run: `max_steps` of its config, or more where it was extended."""
    world_size: int

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.arguments.output_dir)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the forward pass computes in."""
        return training_dtype(self.deepspeed)

    @property
    def device(self) -> str:
        """Return the kind of device that the run computes on here, like "cuda"."""
        return str(get_accelerator().device_name())

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""
        return zero_stage(self.deepspeed)

    @property
    def sequence_parallel(self) -> int:
        """Return the number of ranks that share a sequence."""
        return int(self.deepspeed.get(SEQUENCE, 1))

    @property
    def memory_settings(self) -> MemorySettings:
        """Return the settings that decide the memory of a rank, for the planner."""
        memory = settings(
            self.deepspeed,
            self.config,
            ranks=self.world_size,
            seq_length=self.arguments.seq_length,
            checkpointing=self.arguments.activation_checkpointing,
        )
        return replace(memory, teacher=self.teacher is not None)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a global batch."""
        return int(self.deepspeed["train_batch_size"]) * self.arguments.seq_length

    @property
    def learning_rate(self) -> LearningRate:
        """Return the learning rate as a function of the step; under Muon it is that of the matrices."""
        params = self.deepspeed["optimizer"]["params"]
        peak = float(params["muon_lr"] if "muon_lr" in params else params["lr"])
        arguments = self.arguments
        return LearningRate(
            peak,
            arguments.warmup,
            arguments.min_lr_ratio,
            self.config.max_steps,
            arguments.lr_scheduler_type,
            arguments.lr_scheduler_kwargs,
        )

    def share_of_rate(self, param_group: dict[str, Any]) -> float:
        """Return a param group's learning rate as a share of the run's: other than 1 for Adam's part under Muon."""
        if param_group.get("use_muon", True):
            return 1.0
        params = self.deepspeed["optimizer"]["params"]
        return float(params["adam_lr"] if "adam_lr" in params else params["lr"]) / self.learning_rate.peak


def settings_of(arguments: RunArguments) -> tuple[dict[str, Any], SparseForgeConfig]:
    """Return the DeepSpeed configuration of a run and its sparseforge block, with the flags that replace their keys.

    Raises:
        ValueError: a file, key or value is wrong.
    """
    content = with_batch(
        read_deepspeed(arguments),
        arguments.global_batch,
        arguments.micro_batch,
        arguments.gradient_accumulation_steps,
    )
    overrides = {} if arguments.max_steps is None else {"max_steps": arguments.max_steps}
    # --seed is that of all random choices; a block may name another one for its own.
    config = SparseForgeConfig.from_dict({"seed": arguments.seed, **content["sparseforge"], **overrides})
    return content, config.allowing_dense(arguments.allow_dense)


def read_settings(arguments: RunArguments, world_size: int) -> tuple[dict[str, Any], SparseForgeConfig]:
    """Read the DeepSpeed JSON and its sparseforge block, and check what needs no model.

    Raises:
        ValueError: a file, key, value or batch size is wrong.
    """
    content, config = settings_of(arguments)

    # Check the length of the run, the teacher, the batch, and this machine.
    if arguments.epochs is None:
        config.check_length()
    if arguments.epochs is None and config.max_steps < 1:
        raise ValueError(f"sparseforge.max_steps = {config.max_steps}: nothing to train; set it or give --max_steps")
    if arguments.teacher is not None and config.distillation is None:
        raise ValueError(
            f"--teacher {arguments.teacher}: the sparseforge block says distillation null; "
            'leave the flag out or write "distillation": {}'
        )
    if arguments.teacher_logits is not None:
        _check_teacher_logits(arguments, config)
    batch_arithmetic(content, world_size, sequence_ranks(content, arguments, world_size))
    check_trackers(arguments.report_to)
    check_output_location(arguments)
    return content, config


def _check_teacher_logits(arguments: RunArguments, config: SparseForgeConfig) -> None:
    """Reject `--teacher_logits` where nothing would read them, or more than logits is compared."""
    problem = None
    if config.distillation is None:
        problem = 'the sparseforge block says distillation null; leave the flag out or write "distillation": {}'
    elif arguments.teacher is not None:
        problem = f"--teacher {arguments.teacher} would be another teacher; give one of the two"
    elif config.distillation.hidden is not None:
        problem = (
            'distillation.hidden compares hidden states, which are not stored; set "hidden" to null, or leave it out'
        )
    elif arguments.document_attention:
        problem = (
            "they were made with attention across documents, and --document_attention is set; leave that out, or give "
            "--teacher"
        )
    elif not Path(arguments.teacher_logits or "").is_dir():
        problem = "no such folder; make it by sparseforge teach"
    else:
        require_matching_settings(
            Path(arguments.teacher_logits or ""), arguments.seq_length, config.distillation.temperature
        )
    if problem is not None:
        raise ValueError(f"--teacher_logits {arguments.teacher_logits}: {problem}")


def make_spec(
    arguments: RunArguments,
    world_size: int,
    find: Callable[[str, str], Pretrained] | None = None,
    hardware: Hardware | None = None,
) -> RunSpec:
    """Read and check everything of a run except weights and text. Does not communicate.

    Args:
        arguments: the run flags.
        world_size: number of ranks.
        find: gives a model by its name and the flag that named it, perhaps without tokenizer and weights; None for a
            run that needs them.
        hardware: decides what the JSON leaves "auto"; None for that of this machine.

    Raises:
        ValueError: something is missing, unreadable, unknown or does not fit.
    """
    content, config = read_settings(arguments, world_size)
    hardware = hardware or Hardware.here()
    parts = sequence_ranks(content, arguments, world_size)

    # Find the models.
    if find is None:
        find = find_model
        model = find_model(arguments.model, "--model")
        check_frame(model.tokenizer, arguments.document_frame)
    else:
        model = find(arguments.model, "--model")
    teacher = None
    if config.distillation is not None and arguments.teacher_logits is None:
        if arguments.teacher is None:
            _refuse_sparse_teacher(model)
        teacher = model if arguments.teacher is None else find(arguments.teacher, "--teacher")
        _check_teacher(config, model, teacher)

    # Build them without weights, and check everything that their configs and shapes tell.
    _check_sequences(arguments, parts, model, teacher)
    empty = bare_model(model.config)
    check_shapes(model, "--model", empty)
    empty_teacher = None if teacher is None or teacher is model else bare_model(teacher.config)
    if teacher is not None and empty_teacher is not None:
        check_shapes(teacher, "--teacher", empty_teacher)
    has_own_globs = bool(config.include or config.exclude or config.allow_dense)
    if arguments.any_family:
        config = any_family(empty, config)
    check_measurable(empty, prunable_weights(empty, config), config)
    if arguments.document_attention:
        check_document_attention(empty, f"--model {model.name}")
        if teacher is not None:
            bare = empty if empty_teacher is None else empty_teacher
            check_document_attention(bare, f"--teacher {teacher.name}")

    # Choose the weights to prune.
    weights = prunable_weights(prepare(empty, config), config)
    check_blocks(empty, weights, config)
    uncovered = uncovered_weights(empty, config)

    # Fill in what the DeepSpeed JSON leaves "auto".
    filled = resolve(
        content,
        arguments,
        config,
        world_size=world_size,
        hidden_size=model.hidden_size,
        supports_bf16=hardware.bf16,
        supports_fp16=hardware.fp16,
        fuses_optimizer=hardware.fused,
    )
    check_probe_batch(filled, config.curvature.sequences, world_size // parts, parts)
    _keep_matching_leaves(filled, [name for name, _ in empty.named_modules()])
    leaves = leaf_suffixes(filled)

    text, held_out = find_texts(arguments, model)
    spec = RunSpec(
        arguments=arguments,
        config=config,
        deepspeed=filled,
        model=model,
        teacher=teacher,
        weights=weights,
        coverage=coverage(empty, weights),
        uncovered=uncovered.lines(),
        unneeded=uncovered.unneeded,
        has_own_globs=has_own_globs,
        text=text,
        held_out=held_out,
        steps=config.max_steps,
        sizes=architecture_of(empty, weights, leaves),
        teacher_sizes=None if empty_teacher is None else architecture_of(empty_teacher, (), leaves),
        world_size=world_size,
    )
    if arguments.epochs is None:  # else the spec is made again once the steps are known
        spec.learning_rate.check()
    return spec


def _check_sequences(arguments: RunArguments, parts: int, model: Pretrained, teacher: Pretrained | None) -> None:
    """Reject an attention or a sequence length that model or teacher cannot compute."""
    for pretrained, flag in ((model, "--model"), (teacher, "--teacher")):
        if pretrained is not None:
            if arguments.attn_implementation is not None:
                check_attention(pretrained, arguments.attn_implementation, elsewhere=arguments.dry_run)
            check_length(pretrained, flag, arguments.seq_length, parts, arguments.attn_implementation)


def _keep_matching_leaves(filled: dict[str, Any], modules: list[str]) -> None:
    """Drop the ZeRO-3 leaf suffixes that this model has no module for; DeepSpeed would warn on every rank."""
    zero = filled.get("zero_optimization", {})
    leaf = zero.get("leaf_module")
    if isinstance(leaf, dict) and "name_suffixes" in leaf:
        leaf["name_suffixes"] = [
            suffix for suffix in leaf["name_suffixes"] if any(name.endswith(suffix) for name in modules)
        ]
        if not any(leaf.values()):
            del zero["leaf_module"]


def _refuse_sparse_teacher(model: Pretrained) -> None:
    """Reject a model that was pruned before as its own teacher, which is meant to be dense."""
    record = model.folder / "sparsity.json"
    if not record.is_file():
        return
    source = read_json_object(record).get("source")
    dense = source.get("dense") if isinstance(source, dict) else None
    raise ValueError(
        f"--model {model.name}: is sparse already (sparsity.json), and would be its own teacher; give the dense model "
        f"that it was made of{f' ({dense})' if isinstance(dense, str) else ''}: --teacher DENSE, or "
        f"--teacher {model.name} to stay close to it as it is"
    )


def _check_teacher(config: SparseForgeConfig, model: Pretrained, teacher: Pretrained) -> None:
    """Reject a teacher whose tokens, or distilled hidden states, cannot be compared with the model's."""
    sizes = (pretrained.config.get_text_config().vocab_size for pretrained in (model, teacher))
    try:
        check_same_vocabulary(*sizes)
        # A plan needs no tokenizers, and neither does a teacher.
        folders = [pretrained.folder for pretrained in (model, teacher)]
        if teacher is not model and all(folder.is_dir() and tokenizer_folder(folder) for folder in folders):
            check_same_tokens(model.tokenizer, teacher.folder)
        if config.distillation is not None and config.distillation.hidden is not None:
            check_same_states(model.config, teacher.config, model.folder, teacher.folder)
    except ValueError as error:
        raise ValueError(f"--teacher {teacher.name}: {error}") from None


def find_texts(arguments: RunArguments, model: Pretrained) -> tuple[Mixture, TextSource | None]:
    """Return the text to train on, and that of `--eval_dataset`, if any.

    Raises:
        ValueError: one cannot be found, used or told apart into prompts and completions, its files are empty, or it is
            a stream and has stored logits.
    """
    held_out = find_held_out(arguments)
    text = find_text(arguments.dataset, TextOptions.from_arguments(arguments), held_out)
    for source in text.sources:
        _check_not_empty("--dataset", source)
        if source.streamed and arguments.teacher_logits is not None:
            raise ValueError(
                f"--teacher_logits {arguments.teacher_logits}: --dataset {source.name} is a stream, whose windows have "
                f"no numbers; give files of this machine, without {STREAM}"
            )
    if held_out is not None:
        _check_not_empty("--eval_dataset", held_out)
    # A dry run of a model on the hub has no tokenizer to try.
    if arguments.loss_on == "completion" and model.folder.is_dir():
        for source in text.sources:
            if isinstance(source, LocalText):
                check_trained(source, model.tokenizer, arguments.document_frame)
    return text, held_out


def _check_not_empty(flag: str, source: TextSource) -> None:
    """Reject a text whose files are all empty; one shard of many may be."""
    if isinstance(source, LocalText) and not any(path.stat().st_size for path in source.files.paths):
        raise ValueError(f"{flag} {source.name}: {source.files.describe()}: there is no text in it; give another text")
