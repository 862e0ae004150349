"""What a run needs on a machine, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from transformers import PretrainedConfig

from sparseforge_ds.planning.activations import Activations, trace
from sparseforge_ds.planning.architecture import Architecture
from sparseforge_ds.planning.duration import Duration, duration
from sparseforge_ds.planning.memory import Memory, memory
from sparseforge_ds.planning.recommend import Advice, advise, fewest_ranks, fits
from sparseforge_ds.planning.settings import Settings
from sparseforge_ds.planning.states import Kinds, checkpoint_bytes

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a run is planned for."""

    device: int
    """Bytes of a GPU."""
    reserve: int
    """Bytes of a GPU that are not to be planned with."""
    host: int | None = None
    """Bytes of the host's memory for one rank; None when it does not matter."""
    tflops: float = 989.0
    """Peak of a GPU in the dtype of the run, in 10^12 operations a second."""
    mfu: float = 0.4


@dataclass(frozen=True)
class Plan:
    """The plan of one run."""

    machine: Machine
    settings: Settings
    model: Architecture
    memory: Memory
    duration: Duration
    checkpoint: int
    """Bytes on disk while masks move."""
    frozen_checkpoint: int
    advice: Advice | None
    """When it does not fit."""
    ranks_that_fit: int | None
    """The fewest ranks on which it fits unchanged; None where there are none."""

    @property
    def fits(self) -> bool:
        """Whether a rank finds room."""
        return self.advice is None

    def memory_lines(self) -> Iterator[tuple[str, str]]:
        """A GPU for people, kind by kind and phase by phase."""
        plan, device = self.memory, self.machine.device
        yield "memory of a GPU", "GiB"
        if (parts := self.settings.sequence_parallel) > 1:
            each = f"{self.settings.seq_length // parts:,} of {self.settings.seq_length:,} tokens"
            yield "  each sequence", f"{'on ' + str(parts) + ' GPUs':>8}, {each} and 1/{parts} of the heads a GPU"
        for name, size in plan.resident.items():
            yield f"  {name}", _gib(size)
        for phase, kinds in plan.phases.items():
            yield f"  + {phase}", f"{_gib(sum(kinds.values()))}  {_parts(kinds)}"
        yield "  reserve (assumed)", _gib(plan.reserve)
        moving = "" if plan.peak == plan.frozen_peak else " while masks move"
        yield "  peak", f"{_gib(plan.peak)}  of {device / GIB:.0f}, in {plan.worst}{moving}"
        if moving:
            yield "  peak once frozen", _gib(plan.frozen_peak)
        if plan.host:
            yield "  on the host", f"{_gib(plan.host_total)}  for each GPU: {_parts(plan.host)}"

    def other_lines(self) -> Iterator[tuple[str, str]]:
        """Disk, time and the verdict, for people."""
        frozen = f"{self.frozen_checkpoint / GIB:.2f} once masks are frozen"
        yield "checkpoint", f"{_gib(self.checkpoint)}  GiB on disk, {frozen}"
        took, machine = self.duration, self.machine
        whole = sum(took.flops.values())
        parts = ", ".join(f"{kind} {flops / whole:.0%}" for kind, flops in took.flops.items())
        yield "operations of a step", f"{whole:.3g}: {parts}"
        of_step = f"{took.steps:,} steps of {took.tokens_per_step:,} tokens; {took.seconds_per_step:.2f} s a step and "
        assumed = f"if {machine.mfu:.0%} of {machine.tflops:g} TFLOPS are reached (assumed)"
        yield "time", f"{of_step}{took.hours:,.1f} hours {assumed}"
        peak, device = self.memory.peak / GIB, machine.device / GIB
        if self.advice is None:
            yield "verdict", f"fits, with {device - peak:.1f} of {device:.0f} GiB to spare"
            return
        yield "verdict", f"does not fit: {peak:.1f} GiB where there are {device:.0f}"
        after = f"{self.advice.memory.peak / GIB:.1f} GiB"
        yield "", f"it fits ({after}) with:" if self.advice.fits else f"not even this is enough ({after}):"
        yield from (("", f"  {line}") for line in self.advice.lines)
        if self.advice.memory.host:
            yield "", f"  and {self.advice.memory.host_total / GIB:.0f} GiB of the host's memory for each GPU"
        if self.ranks_that_fit is not None:
            yield "", f"or, as it is, on {self.ranks_that_fit} GPUs"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in bytes and seconds."""
        plan, advice = self.memory, self.advice
        return {
            "fits": self.fits,
            "memory": {"device": self.machine.device, "peak": plan.peak, "worst": plan.worst, **vars(plan)},
            "time": vars(self.duration),
            "checkpoint": self.checkpoint,
            "frozen_checkpoint": self.frozen_checkpoint,
            "advice": advice and {"changes": advice.lines, "peak": advice.memory.peak, "fits": advice.fits},
            "ranks_that_fit": self.ranks_that_fit,
        }


def make_plan(
    config: PretrainedConfig,
    model: Architecture,
    settings: Settings,
    machine: Machine,
    *,
    teacher: tuple[PretrainedConfig, Architecture] | None = None,
    tokens: int | None = None,
) -> Plan:
    """Plan a run, without weights: of a student's config and sizes, and those of a teacher that is another model.

    Raises ValueError where the model cannot be run on the meta device.
    """
    told, other = teacher or (config, None)

    @cache
    def activations(micro_batch: int, checkpointing: bool) -> Activations:
        return trace(
            config,
            settings.forge,
            dtype=settings.dtype,
            micro_batch=micro_batch,
            seq_length=settings.seq_length,
            parts=settings.sequence_parallel,
            checkpointing=checkpointing,
            teacher=told if settings.teacher else None,
        )

    estimate = cache(partial(memory, model, trace=activations, teacher=other, reserve=machine.reserve))
    found = estimate(settings)
    limits = machine.device, machine.host
    roomy = fits(found, *limits)
    tokens = tokens or settings.forge.max_steps * settings.tokens_per_step
    return Plan(
        machine=machine,
        settings=settings,
        model=model,
        memory=found,
        duration=duration(model, settings, other, tokens=tokens, tflops=machine.tflops, mfu=machine.mfu),
        checkpoint=checkpoint_bytes(model, settings),
        frozen_checkpoint=checkpoint_bytes(model, settings, frozen=True),
        advice=None if roomy else advise(settings, estimate, *limits),
        ranks_that_fit=settings.ranks if roomy else fewest_ranks(settings, estimate, *limits),
    )


def _parts(kinds: Kinds) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in kinds.items())


def _gib(size: float) -> str:
    return f"{size / GIB:8.2f}"
