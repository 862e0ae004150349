"""One model on one machine: everything that the planner knows of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

from transformers import PretrainedConfig

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.deepspeed_config import read_deepspeed_json, resolve, with_batch
from sparseforge_ds.planning.activations import Activations, trace
from sparseforge_ds.planning.architecture import Architecture, bare_model, describe, empty_model
from sparseforge_ds.planning.duration import Duration, duration
from sparseforge_ds.planning.estimator_support import weights_to_prune
from sparseforge_ds.planning.memory import Memory, Trace, memory
from sparseforge_ds.planning.model_config import read_model_config
from sparseforge_ds.planning.recommend import Advice, Estimate, advise, fewest_ranks, fits, largest_micro_batch
from sparseforge_ds.planning.settings import Settings, check_estimable, settings
from sparseforge_ds.planning.states import checkpoint_bytes

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a run is planned for."""

    ranks: int
    device: int
    """Bytes of a GPU."""
    host: int | None
    """Bytes of the host's memory for one rank; None when it does not matter."""
    reserve: int
    """Bytes of a GPU that are not to be planned with."""
    tflops: float
    """Peak of a GPU."""
    mfu: float
    bf16: bool = True
    fused: bool = True
    """Whether an optimizer's step is one kernel where the JSON leaves that open, as on GPUs."""


@dataclass(frozen=True)
class Request:
    """What is to be planned; None stands for what the configuration says."""

    model: str
    teacher: str | None
    seq_length: int | None
    checkpointing: bool
    micro_batch: int | None
    global_batch: int | None
    max_steps: int | None
    tokens: int | None
    allow_dense: tuple[str, ...] = ()
    """As for the launcher."""


@dataclass(frozen=True)
class Study:
    """The plan of one DeepSpeed configuration."""

    request: Request
    machine: Machine
    settings: Settings
    model: Architecture
    teacher: Architecture | None
    """When it is another model than the student."""
    memory: Memory
    activations: dict[str, Activations]
    """Of a training micro-batch, "kept" and "recomputed"."""
    duration: Duration
    checkpoint: int
    frozen_checkpoint: int
    layouts: dict[str, Memory]
    """The same run under each ZeRO stage, and with everything on the host that can be."""
    largest_micro_batch: int
    advice: Advice | None
    """When it does not fit."""
    ranks_that_fit: int | None
    """The fewest ranks on which it fits unchanged, when it does not on these."""

    @property
    def fits(self) -> bool:
        """Whether a rank finds room."""
        return fits(self.memory, self.machine.device, self.machine.host)


def study(path: str, request: Request, machine: Machine) -> Study:
    """Plan a run from its DeepSpeed JSON, without weights.

    Args:
        path: the JSON, as for the launcher.
        request: model, batch and length.
        machine: how many GPUs, and of which kind.

    Raises:
        ValueError: something is missing, unknown, or does not fit together.
    """
    overrides = {} if request.max_steps is None else {"max_steps": request.max_steps}
    content = read_deepspeed_json(path)
    forge = SparseForgeConfig.from_json(path, **overrides).allowing_dense(request.allow_dense)
    if request.teacher is not None and forge.distillation is None:
        raise ValueError(f"--teacher {request.teacher}: the sparseforge block of {path} says distillation null")
    config = read_model_config(request.model)
    text = config.get_text_config()
    resolved = resolve(
        with_batch(content, request.global_batch, request.micro_batch),
        RunArguments(deepspeed=path),
        forge,
        world_size=machine.ranks,
        hidden_size=int(text.hidden_size),
        supports_bf16=machine.bf16,
        supports_fp16=True,
        fuses_optimizer=machine.fused,
    )
    check_estimable(resolved)
    laid_out = settings(
        resolved,
        forge,
        name=path,
        ranks=machine.ranks,
        seq_length=_length(request, getattr(text, "max_position_embeddings", None)),
        checkpointing=request.checkpointing,
    )
    weights_to_prune(bare_model(config, laid_out.dtype), forge)  # for its errors
    model = describe(empty_model(config, forge, laid_out.dtype), forge, laid_out.leaves)
    teacher_config = _teacher_config(request, text.vocab_size)
    teacher = None if teacher_config is None else describe_teacher(teacher_config, laid_out)
    run, estimate = estimators(config, model, laid_out, teacher, teacher_config, machine.reserve)
    found = estimate(laid_out)
    roomy = fits(found, machine.device, machine.host)
    tokens = request.tokens or forge.max_steps * laid_out.tokens_per_step
    return Study(
        request=request,
        machine=machine,
        settings=laid_out,
        model=model,
        teacher=teacher,
        memory=found,
        activations={
            name: run(laid_out.micro_batch, again, True) for name, again in (("kept", False), ("recomputed", True))
        },
        duration=duration(model, laid_out, teacher, tokens=tokens, tflops=machine.tflops, mfu=machine.mfu),
        checkpoint=checkpoint_bytes(model, laid_out),
        frozen_checkpoint=checkpoint_bytes(model, laid_out, frozen=True),
        layouts={name: estimate(changed) for name, changed in _layouts(laid_out).items()},
        largest_micro_batch=largest_micro_batch(laid_out, estimate, machine.device),
        advice=None if roomy else advise(laid_out, estimate, machine.device, machine.host),
        ranks_that_fit=machine.ranks if roomy else fewest_ranks(laid_out, estimate, machine.device, machine.host),
    )


def estimators(
    config: PretrainedConfig,
    model: Architecture,
    laid_out: Settings,
    teacher: Architecture | None,
    teacher_config: PretrainedConfig | None,
    reserve: int,
) -> tuple[Trace, Estimate]:
    """Activations by (micro-batch, checkpointing, teacher), and memory by settings; neither is computed twice.

    Args:
        config: of the student, to be run on the meta device.
        model: the student.
        laid_out: gives what no change of settings touches: dtype, length, the sparseforge block.
        teacher: when it is another model than the student.
        teacher_config: its config.
        reserve: bytes of a GPU that are not to be planned with.
    """

    @cache
    def run(micro_batch: int, checkpointing: bool, with_teacher: bool) -> Activations:
        return trace(
            config,
            laid_out.forge,
            dtype=laid_out.dtype,
            micro_batch=micro_batch,
            seq_length=laid_out.seq_length,
            checkpointing=checkpointing,
            teacher=(teacher_config or config) if with_teacher and laid_out.teacher else None,
        )

    @cache
    def estimate(changed: Settings) -> Memory:
        return memory(model, changed, run, teacher=teacher, reserve=reserve)

    return run, estimate


def describe_teacher(config: PretrainedConfig, laid_out: Settings) -> Architecture:
    """The sizes of a teacher, which has no branches and to which the globs do not apply."""
    plain = dataclasses.replace(laid_out.forge, low_rank=None, include=(), exclude=())
    return describe(empty_model(config, plain, laid_out.dtype), plain, laid_out.leaves)


def _length(request: Request, positions: int | None) -> int:
    if request.seq_length and positions is not None and request.seq_length > positions:
        raise ValueError(
            f"--seq_length {request.seq_length}: {request.model} has {positions} positions; use at most that many"
        )
    return request.seq_length or min(4096, positions or 4096)


def _teacher_config(request: Request, vocabulary: int) -> PretrainedConfig | None:
    if request.teacher is None:
        return None
    config = read_model_config(request.teacher, "--teacher")
    theirs = config.get_text_config().vocab_size
    if theirs != vocabulary:
        raise ValueError(
            f"--teacher {request.teacher} has a vocabulary of {theirs}, --model {request.model} of {vocabulary}; "
            "distillation needs a teacher with the same tokenizer"
        )
    return config


def _layouts(laid_out: Settings) -> dict[str, Settings]:
    """What the JSONs in ds_configs/ differ in."""
    change = dataclasses.replace
    here = change(laid_out, optimizer_on_host=False, weights_on_host=False)
    stages = {
        f"ZeRO-{stage}": change(here, stage=stage, overlapped=laid_out.overlapped and stage == laid_out.stage)
        for stage in (0, 1, 2, 3)
    }
    offloaded = change(stages["ZeRO-3"], optimizer_on_host=True)
    return {
        **stages,
        "ZeRO-3, optimizer on the host": offloaded,
        "ZeRO-3, optimizer and weights on the host": change(offloaded, weights_on_host=True),
    }
