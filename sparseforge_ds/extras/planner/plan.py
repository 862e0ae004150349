"""Plan of a run on a machine: memory, time, disk, and the changes with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from transformers import PretrainedConfig

from sparseforge_ds.extras.planner.activation_memory import Activations, Pass, trace
from sparseforge_ds.extras.planner.flops import forward_flops, head_flops, training_flops
from sparseforge_ds.extras.planner.machine import GIB, Machine
from sparseforge_ds.extras.planner.memory import Memory, memory
from sparseforge_ds.extras.planner.start import start_flops, start_tokens
from sparseforge_ds.model.architecture import Architecture
from sparseforge_ds.train.lasting_memory import Kinds, checkpoint_bytes
from sparseforge_ds.train.memory_settings import MemorySettings


@dataclass(frozen=True)
class Plan:
    """Plan of one run."""

    machine: Machine
    settings: MemorySettings
    model: Architecture
    memory: Memory
    seconds_per_step: float
    start_seconds: float
    """Seconds of a block-wise start, before the first step."""
    steps: int
    checkpoint: int
    """Bytes on disk while masks move."""
    frozen_checkpoint: int
    """Bytes on disk once masks are frozen."""
    ladder: list[tuple[str, int]]
    """Changes for a run that does not fit, each on top of those before it and the dearest last, with the remaining
    peak; the list ends when the run fits or nothing is left to change."""

    @property
    def fits(self) -> bool:
        """True if a rank fits on a GPU."""
        return self.memory.peak <= self.machine.device

    def memory_lines(self) -> Iterator[tuple[str, str]]:
        """Yield readable lines on a GPU's memory, by kind and phase, in MiB if the run takes less than a GiB."""
        memory = self.memory
        name, unit = _unit(max(memory.peak - memory.reserve, memory.host_total))
        yield "memory of a GPU", name
        if (parts := self.settings.sequence_parallel) > 1:
            tokens = f"{self.settings.seq_length // parts:,} of {self.settings.seq_length:,} tokens"
            yield "  each sequence", f"{'on ' + str(parts) + ' GPUs':>8}, {tokens} and 1/{parts} of the heads a GPU"
        # Resident kinds, then the phases.
        for kind, size in memory.resident.items():
            yield f"  {kind}", _in(unit, size)
        for phase, kinds in memory.phases.items():
            yield f"  + {phase}", f"{_in(unit, sum(kinds.values()))}  {_parts(unit, kinds)}"
        # Their peak.
        yield "  reserve (assumed)", _in(unit, memory.reserve)
        moving = "" if memory.peak == memory.frozen_peak else " while masks move"
        room = self.machine.device / unit
        yield "  peak", f"{_in(unit, memory.peak)}  of {room:.0f}, in {memory.worst}{moving}"
        if moving:
            yield "  peak once frozen", _in(unit, memory.frozen_peak)
        if memory.host:
            yield "  on the host", f"{_in(unit, memory.host_total)}  for each GPU: {_parts(unit, memory.host)}"

    def other_lines(self) -> Iterator[tuple[str, str]]:
        """Yield readable lines on disk, time and the verdict."""
        name, unit = _unit(self.checkpoint)
        frozen = f"{self.frozen_checkpoint / unit:.2f} once masks are frozen"
        yield "checkpoint", f"{_in(unit, self.checkpoint)}  {name} on disk, {frozen}"
        # Time, under the assumed speed.
        machine = self.machine
        hours = self.seconds_per_step * self.steps / 3600
        steps = f"{self.steps:,} steps of {self.settings.tokens_per_step:,} tokens; {self.seconds_per_step:.2f} s each"
        yield "time", f"{hours:,.1f} hours: {steps}, at {machine.mfu:.0%} of {machine.tflops:g} TFLOPS (assumed)"
        if self.start_seconds:
            yield (
                "start",
                f"{self.start_seconds / 60:,.1f} minutes: {start_tokens(self.settings):,} tokens, block by block",
            )
        # The verdict, and the ladder of changes.
        peak = self.memory.peak / GIB
        room = machine.device / GIB
        if self.fits:
            yield "verdict", f"fits, with {room - peak:.1f} of {room:.0f} GiB to spare"
            return
        yield "verdict", f"does not fit: {peak:.1f} GiB where there are {room:.0f}; one on top of the other:"
        for change, size in self.ladder:
            yield f"  + {change}", f"{_in(GIB, size)}{'  fits' if size <= machine.device else ''}"
        if not self.ladder or self.ladder[-1][1] > machine.device:
            yield "", "take more GPUs, or larger ones"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON types, in bytes and seconds."""
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
    settings: MemorySettings,
    machine: Machine,
    *,
    teacher: tuple[PretrainedConfig, Architecture] | None = None,
) -> Plan:
    """Plan a run without weights.

    Args:
        config: the student's config.
        model: its sizes.
        settings: the run, as far as memory depends on it.
        machine: the GPU.
        teacher: config and sizes of a teacher that is another model.

    Raises:
        ValueError: the model cannot be run on the meta device.
    """
    teacher_config, teacher_sizes = teacher or (config, None)

    @cache
    def activations(micro_batch: int, checkpointing: bool, expert_hooks: bool) -> Activations:
        step = Pass(
            settings.dtype,
            micro_batch,
            settings.seq_length,
            parts=settings.sequence_parallel,
            checkpointing=checkpointing,
            expert_hooks=expert_hooks,
        )
        return trace(config, settings.forge, step, teacher_config if settings.teacher else None)

    def estimate(changed: MemorySettings) -> Memory:
        return memory(model, changed, activations, teacher=teacher_sizes, reserve=machine.reserve)

    # Probe passes, some 15 in a run that has any, are left out.
    forward = forward_flops(config, model, settings.seq_length)
    token_flops = training_flops(forward, model, settings.checkpointing)
    if settings.teacher:
        sizes = teacher_sizes or model
        token_flops += forward_flops(teacher_config, sizes, settings.seq_length) + head_flops(sizes)
    needed = estimate(settings)
    speed = settings.ranks * machine.tflops * 1e12 * machine.mfu
    return Plan(
        machine=machine,
        settings=settings,
        model=model,
        memory=needed,
        seconds_per_step=settings.tokens_per_step * token_flops / speed,
        start_seconds=start_flops(model, settings, forward) / speed,
        steps=settings.forge.max_steps,
        checkpoint=checkpoint_bytes(model, settings),
        frozen_checkpoint=checkpoint_bytes(model, settings, frozen=True),
        ladder=[]
        if needed.peak <= machine.device
        else ladder(settings, lambda changed: estimate(changed).peak, machine.device),
    )


def ladder(settings: MemorySettings, peak: Callable[[MemorySettings], int], device: int) -> list[tuple[str, int]]:
    """Return `Plan.ladder` for a GPU of `device` bytes; the global batch stays the same."""
    rungs = []
    # One GPU has nothing to divide, and takes a higher stage only with the offload that asks for it.
    alone = settings.ranks == 1
    stage3 = {"stage": 3, "overlapped": True} if settings.stage < 3 else {}
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
        rungs.append((change, peak(settings)))
        if rungs[-1][1] <= device:
            break
    return rungs


def _unit(largest: int) -> tuple[str, int]:
    """Return the unit of a column of sizes, as its name and in bytes."""
    return ("MiB", 2**20) if largest < GIB else ("GiB", GIB)


def _parts(unit: int, kinds: Kinds) -> str:
    return ", ".join(f"{name} {size / unit:.2f}" for name, size in kinds.items())


def _in(unit: int, size: float) -> str:
    return f"{size / unit:8.2f}"
