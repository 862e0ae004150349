"""What a run needs on a machine, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from transformers import PretrainedConfig

from sparseforge_ds.extras.planner.activations import Activations, trace
from sparseforge_ds.extras.planner.machine import GIB, Machine
from sparseforge_ds.extras.planner.memory import Memory, memory
from sparseforge_ds.extras.planner.operations import operations
from sparseforge_ds.extras.planner.start import start_operations, start_tokens
from sparseforge_ds.model.architecture import Architecture
from sparseforge_ds.train.lasting_memory import Kinds, checkpoint_bytes
from sparseforge_ds.train.memory_settings import Settings


@dataclass(frozen=True)
class Plan:
    """The plan of one run."""

    machine: Machine
    settings: Settings
    model: Architecture
    memory: Memory
    seconds_per_step: float
    start_seconds: float
    """Seconds of a start that goes block by block, before the first step."""
    steps: int
    checkpoint: int
    """Bytes on disk while masks move."""
    frozen_checkpoint: int
    ladder: list[tuple[str, int]]
    """Where it does not fit: changes, each on top of those before it and dearest last, with the peak that is then
    left, until it fits or there is nothing more to change."""

    @property
    def fits(self) -> bool:
        """Whether a rank finds room."""
        return self.memory.peak <= self.machine.device

    def memory_lines(self) -> Iterator[tuple[str, str]]:
        """A GPU for people, kind by kind and phase by phase, in MiB where the run itself takes less than a GiB."""
        plan, device = self.memory, self.machine.device
        name, unit = _unit(max(plan.peak - plan.reserve, plan.host_total))
        yield "memory of a GPU", name
        if (parts := self.settings.sequence_parallel) > 1:
            each = f"{self.settings.seq_length // parts:,} of {self.settings.seq_length:,} tokens"
            yield "  each sequence", f"{'on ' + str(parts) + ' GPUs':>8}, {each} and 1/{parts} of the heads a GPU"
        for kind, size in plan.resident.items():
            yield f"  {kind}", _in(unit, size)
        for phase, kinds in plan.phases.items():
            yield f"  + {phase}", f"{_in(unit, sum(kinds.values()))}  {_parts(unit, kinds)}"
        yield "  reserve (assumed)", _in(unit, plan.reserve)
        moving = "" if plan.peak == plan.frozen_peak else " while masks move"
        yield "  peak", f"{_in(unit, plan.peak)}  of {device / unit:.0f}, in {plan.worst}{moving}"
        if moving:
            yield "  peak once frozen", _in(unit, plan.frozen_peak)
        if plan.host:
            yield "  on the host", f"{_in(unit, plan.host_total)}  for each GPU: {_parts(unit, plan.host)}"

    def other_lines(self) -> Iterator[tuple[str, str]]:
        """Disk, time and the verdict, for people."""
        name, unit = _unit(self.checkpoint)
        frozen = f"{self.frozen_checkpoint / unit:.2f} once masks are frozen"
        yield "checkpoint", f"{_in(unit, self.checkpoint)}  {name} on disk, {frozen}"
        machine, hours = self.machine, self.seconds_per_step * self.steps / 3600
        of_steps = (
            f"{self.steps:,} steps of {self.settings.tokens_per_step:,} tokens; {self.seconds_per_step:.2f} s each"
        )
        yield "time", f"{hours:,.1f} hours: {of_steps}, at {machine.mfu:.0%} of {machine.tflops:g} TFLOPS (assumed)"
        if self.start_seconds:
            yield (
                "start",
                f"{self.start_seconds / 60:,.1f} minutes: {start_tokens(self.settings):,} tokens, block by block",
            )
        peak, room = self.memory.peak / GIB, machine.device / GIB
        if self.fits:
            yield "verdict", f"fits, with {room - peak:.1f} of {room:.0f} GiB to spare"
            return
        yield "verdict", f"does not fit: {peak:.1f} GiB where there are {room:.0f}; one on top of the other:"
        for change, size in self.ladder:
            yield f"  + {change}", f"{_in(GIB, size)}{'  fits' if size <= machine.device else ''}"
        if not self.ladder or self.ladder[-1][1] > machine.device:
            yield "", "take more GPUs, or larger ones"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in bytes and seconds."""
        return {
            "fits": self.fits,
            "memory": {"device": self.machine.device, "peak": self.memory.peak, "worst": self.memory.worst}
            | vars(self.memory),
            "time": {
                "steps": self.steps,
                "seconds_per_step": self.seconds_per_step,
                "start_seconds": self.start_seconds,
            },
            "checkpoint": self.checkpoint,
            "frozen_checkpoint": self.frozen_checkpoint,
            "ladder": self.ladder,
        }


def make_plan(
    config: PretrainedConfig,
    model: Architecture,
    settings: Settings,
    machine: Machine,
    *,
    teacher: tuple[PretrainedConfig, Architecture] | None = None,
) -> Plan:
    """Plan a run, without weights: of a student's config and sizes, and those of a teacher that is another model.

    Raises ValueError where the model cannot be run on the meta device.
    """
    told, other = teacher or (config, None)

    @cache
    def activations(micro_batch: int, checkpointing: bool, heard: bool) -> Activations:
        return trace(
            config,
            settings.forge,
            dtype=settings.dtype,
            micro_batch=micro_batch,
            seq_length=settings.seq_length,
            parts=settings.sequence_parallel,
            checkpointing=checkpointing,
            teacher=told if settings.teacher else None,
            heard=heard,
        )

    def estimate(changed: Settings) -> Memory:
        return memory(model, changed, activations, teacher=other, reserve=machine.reserve)

    # Backward takes twice what forward takes. Passes for the curvature alone, of which a run has about 15 by default,
    # where it has any, are left out.
    forward = operations(config, model, settings.seq_length)
    taught = operations(told, other or model, settings.seq_length) if settings.teacher else 0
    of_token = (3 + settings.checkpointing) * forward + taught
    found = estimate(settings)
    speed = settings.ranks * machine.tflops * 1e12 * machine.mfu
    return Plan(
        machine=machine,
        settings=settings,
        model=model,
        memory=found,
        seconds_per_step=settings.tokens_per_step * of_token / speed,
        start_seconds=start_operations(model, settings, forward) / speed,
        steps=settings.forge.max_steps,
        checkpoint=checkpoint_bytes(model, settings),
        frozen_checkpoint=checkpoint_bytes(model, settings, frozen=True),
        ladder=[]
        if found.peak <= machine.device
        else ladder(settings, lambda each: estimate(each).peak, machine.device),
    )


def ladder(settings: Settings, peak: Callable[[Settings], int], device: int) -> list[tuple[str, int]]:
    """`Plan.ladder` for a GPU of `device` bytes; the global batch stays."""
    found = []
    # One GPU has nothing to divide, and takes a higher stage only with the offload that asks for it.
    alone, stage3 = settings.ranks == 1, {"stage": 3, "overlapped": True} if settings.stage < 3 else {}
    stage1 = {"stage": 1} if alone and settings.stage == 0 else {}
    for change, values in (
        ("--activation_checkpointing", {"checkpointing": True}),
        ("--micro_batch 1", {"micro_batch": 1, "accumulation": settings.accumulation * settings.micro_batch}),
        ("ZeRO stage 3", {} if alone else stage3),
        (f"{'ZeRO stage 1 and ' if stage1 else ''}offload_optimizer to the CPU", {"optimizer_on_host": True, **stage1}),
        (
            f"{'ZeRO stage 3 and ' if alone and stage3 else ''}offload_param to the CPU",
            {"weights_on_host": True, **stage3},
        ),
    ):
        changed = replace(settings, **values)  # type: ignore[arg-type]
        if changed == settings:
            continue
        settings = changed
        found.append((change, peak(settings)))
        if found[-1][1] <= device:
            break
    return found


def _unit(largest: int) -> tuple[str, int]:
    """The unit of a column of sizes, by its name and in bytes."""
    return ("MiB", 2**20) if largest < GIB else ("GiB", GIB)


def _parts(unit: int, kinds: Kinds) -> str:
    return ", ".join(f"{name} {size / unit:.2f}" for name, size in kinds.items())


def _in(unit: int, size: float) -> str:
    return f"{size / unit:8.2f}"
