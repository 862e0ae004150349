"""Memory of one rank, by kind and by moment of a step. Bytes throughout.

Some tensors are there all the time. Others come and go, so that the peak is that of the worst moment: a micro-batch's
forward and backward pass, the optimizer's step, or a mask update with its probe.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from sparseforge_ds.mask.runs import PIECE
from sparseforge_ds.model.head import micro_batches_at_once
from sparseforge_ds.planning.activations import Activations
from sparseforge_ds.planning.architecture import Architecture
from sparseforge_ds.planning.curvature_memory import heard, probe
from sparseforge_ds.planning.gathering import Gathering, Step, forward_backward, forward_only, replay
from sparseforge_ds.planning.settings import Settings
from sparseforge_ds.planning.states import (
    Kinds,
    always_frozen,
    kept_gradients,
    local,
    model_states,
    positive,
    teacher_weights,
)

_MASK_SCRATCH = 32
"""Bytes an element of a piece of a shard that scores, gates and the flip count may take while it is updated."""

Trace = Callable[..., Activations]
"""`trace(micro_batch, checkpointing, teacher)` of the model at hand."""


@dataclass(frozen=True)
class Memory:
    """What one rank needs."""

    resident: Kinds
    """On the device, all the time."""
    host: Kinds
    """In the host's memory, for this rank."""
    moments: dict[str, Kinds]
    """On the device besides, while this happens."""
    reserve: int
    """For the driver's context, communication buffers and fragmentation; assumed, not derived."""
    frozen_peak: int
    """The most that the device must hold once masks are frozen; `peak` is of while they move, if they do."""

    @property
    def worst(self) -> str:
        """The moment with the peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> int:
        """The most that the device must hold."""
        return sum(self.resident.values()) + sum(self.moments[self.worst].values()) + self.reserve

    @property
    def host_total(self) -> int:
        """Of `host`."""
        return sum(self.host.values())


def memory(
    model: Architecture,
    settings: Settings,
    trace: Trace,
    *,
    teacher: Architecture | None = None,
    reserve: int = 0,
) -> Memory:
    """Add up a rank.

    Args:
        model: the student.
        settings: how it is laid out.
        trace: gives the activations of a micro-batch.
        teacher: the teacher, when it is another model than the student; ignored without distillation.
        reserve: bytes that are not to be planned with.
    """
    frozen = None if always_frozen(settings) else _phase(model, settings, trace, teacher, reserve, frozen=True).peak
    found = _phase(model, settings, trace, teacher, reserve, frozen=always_frozen(settings))
    return dataclasses.replace(found, frozen_peak=found.peak if frozen is None else frozen)


def _phase(
    model: Architecture, settings: Settings, trace: Trace, teacher: Architecture | None, reserve: int, frozen: bool
) -> Memory:
    states = model_states(model, settings, frozen)
    on_host = _on_host(settings)
    resident = {name: size for name, size in states.items() if name not in on_host}
    host = {name: size for name, size in states.items() if name in on_host}
    gathered = weights_gathered(model, settings)
    resident["persistent weights"] = gathered.persistent * settings.low if settings.stage == 3 else 0
    if settings.teacher:
        for name, size in _teacher(teacher or model, settings).items():
            (host if settings.weights_on_host and name == "teacher" else resident)[name] = size
    if settings.stage == 3:
        if settings.contiguous:
            resident["gradient bucket"] = settings.bucket * settings.low
        (host if settings.optimizer_on_host else resident)["gradients"] = kept_gradients(model, settings)
    if settings.optimizer_on_host:
        host["fp32 gradients"] = 4 * local(model, settings, 1)
        if settings.stage < 3:
            resident["gradient staging"] = model.largest * settings.low
            host["weights to copy"] = local(model, settings, 1) * settings.low
    return Memory(
        resident=positive(resident),
        host=positive(host),
        moments={
            name: positive(kinds)
            for name, kinds in _moments(model, settings, trace, gathered, teacher or model, frozen).items()
            if not frozen or name != "mask update" or always_frozen(settings)
        },
        reserve=reserve,
        frozen_peak=0,
    )


def weights_gathered(model: Architecture, settings: Settings, backward: bool = True) -> Gathering:
    """What ZeRO-3 gathers of the student in a micro-batch, or in its forward pass alone; nothing at other stages."""
    if settings.stage < 3:
        return Gathering(0, 0, 0, 0)
    return _gathered(model, settings, forward_backward(model, settings.checkpointing) if backward else None)


def teacher_gathered(teacher: Architecture, settings: Settings) -> Gathering:
    """What a teacher under ZeRO-3 gathers in a pass; nothing for a replicated one."""
    if not _divided_teacher(settings):
        return Gathering(0, 0, 0, 0)
    return _gathered(teacher, settings, None)


def teacher_passes(settings: Settings) -> tuple[int, int]:
    """(passes of a teacher in a step, micro-batches of the largest)."""
    together = min(settings.accumulation, micro_batches_at_once(settings.micro_batch * settings.seq_length))
    return math.ceil(settings.accumulation / together), together


def teacher_head(teacher: Architecture, settings: Settings) -> int:
    """Bytes of a divided teacher's head, which is gathered once more for the losses of a step."""
    return teacher.vocabulary * teacher.hidden * settings.low if _divided_teacher(settings) else 0


def _divided_teacher(settings: Settings) -> bool:
    distillation = settings.forge.distillation
    return settings.teacher and distillation is not None and distillation.hold == "zero3"


def _gathered(model: Architecture, settings: Settings, steps: list[Step] | None) -> Gathering:
    limits = (settings.prefetch, settings.persistence, settings.max_live, settings.max_reuse)
    return _replayed(model, tuple(forward_only(model) if steps is None else steps), limits)


@cache
def _replayed(model: Architecture, steps: tuple[Step, ...], limits: tuple[int, int, int, int]) -> Gathering:
    prefetch, persistence, max_live, max_reuse = limits
    return replay(model, steps, prefetch=prefetch, persistence=persistence, max_live=max_live, max_reuse=max_reuse)


def _on_host(settings: Settings) -> set[str]:
    ours = {"dense", "mask", "curvature", "logits", "kept bits", "flip bits"}
    names = {"master", "moments"} | ours if settings.optimizer_on_host else set()
    return names | ({"weights"} if settings.weights_on_host else set())


def _teacher(teacher: Architecture, settings: Settings) -> Kinds:
    persistent = settings.low * teacher_gathered(teacher, settings).persistent
    return {"teacher": teacher_weights(teacher, settings), "teacher's persistent weights": persistent}


def _moments(
    model: Architecture,
    settings: Settings,
    trace: Trace,
    gathered: Gathering,
    teacher: Architecture,
    frozen: bool,
) -> dict[str, Kinds]:
    low = settings.low
    passing: Kinds = {}
    if settings.stage == 3:
        # The all-gather lands in one flat tensor, from which the weights are copied.
        copy = gathered.largest if settings.ranks > 1 and not settings.sequential else 0
        passing = {"gathered weights": gathered.live * low, "gathering": copy * low}
    else:
        whole = settings.stage < 2
        passing["gradients"] = low * model.total if whole else kept_gradients(model, settings)
        if settings.stage == 1:
            passing["reduced gradients"] = 0 if settings.optimizer_on_host else kept_gradients(model, settings)
        if settings.stage == 2 and settings.optimizer_on_host:
            passing["gradients"] = 0
        if settings.stage and settings.contiguous:
            passing["gradient bucket"] = settings.bucket * low * (2 if settings.overlapped else 1)
    shard = _largest_shard(model, settings)
    activations = trace(settings.micro_batch, settings.checkpointing, True)
    told: Kinds = {}
    if settings.teacher:
        tokens = settings.accumulation * settings.micro_batch * settings.seq_length
        told = {"teacher's hidden states": tokens * teacher.hidden * low}
    return {
        **({"teacher": {**_of_teacher(teacher, settings, activations), **told}} if settings.teacher else {}),
        "forward and backward": {
            **passing,
            **_of_pass(activations),
            **told,
            "teacher's head": teacher_head(teacher, settings),
            **(heard(model, settings) if settings.forge.listens and not frozen else {}),
        },
        "optimizer step": _step(model, settings, shard, frozen),
        "mask update": _update(model, settings, trace, passing, shard),
    }


def _of_teacher(teacher: Architecture, settings: Settings, activations: Activations) -> Kinds:
    gathered = teacher_gathered(teacher, settings)
    copy = gathered.largest if settings.ranks > 1 and not settings.sequential else 0
    return {
        "gathered weights": gathered.live * settings.low,
        "gathering": copy * settings.low,
        "activations": teacher_passes(settings)[1] * activations.teacher,
    }


def _of_pass(activations: Activations) -> Kinds:
    """Split a peak into what causes it."""
    at_loss = activations.saved + activations.loss
    if at_loss >= activations.backward:
        return {
            "activations": activations.saved,
            "logits": activations.logits,
            "loss": activations.loss - activations.logits,
        }
    return {"activations": activations.backward}


def _step(model: Architecture, settings: Settings, shard: int, frozen: bool) -> Kinds:
    kept = 0 if settings.stage == 3 else kept_gradients(model, settings)
    if settings.optimizer_on_host:
        return {}
    group = _largest_group(model, settings)
    gradients = 0 if settings.stage == 0 and settings.low == 4 else 4 * group
    if settings.bf16_states:
        gradients += 2 * group  # DeepSpeed hands over gradients in bf16, which are cast for the dense weights
    if settings.stage == 0:
        group = model.total if settings.low == 2 else model.largest
        gradients = 4 * group if settings.low == 2 else 0
    return {
        "gradients": kept,
        "fp32 gradients": gradients,
        "weights before the step": 0 if frozen else _before_step(model, settings),
        "optimizer's temporaries": 0 if settings.fused_optimizer else 4 * group,
        "mask's temporaries": _MASK_SCRATCH * min(shard, PIECE),
    }


def _before_step(model: Architecture, settings: Settings) -> int:
    """Bytes of the fp32 weights that a step began from, which a master in bf16 has no room for."""
    forge = settings.forge
    follows = forge.method == "sparseforge" and not forge.schedule.straight_through
    if settings.of_master != 2 or not follows or not forge.resolved_schedule.freeze_step:
        return 0
    masked = local(model, settings, 1, only_masked=True)
    return 4 * (min(masked, settings.sub_group) if settings.stage == 3 else masked)


def _update(model: Architecture, settings: Settings, trace: Trace, passing: Kinds, shard: int) -> Kinds:
    """A mask update; scores and gates come after the passes of a probe, where there is one."""
    scratch = {"mask's temporaries": _MASK_SCRATCH * min(shard, PIECE)}
    if settings.forge.listens:
        # What was heard and its fp32 copy, the numbers that each matrix's are divided and averaged by, and the mean.
        return {"row and column sums": 20 * model.rows_and_columns, **scratch}
    if not settings.forge.keeps_curvature:
        return scratch
    return {
        **passing,
        **_of_pass(trace(settings.micro_batch, settings.checkpointing, False)),
        **probe(model, settings, shard),
    }


def _largest_group(model: Architecture, settings: Settings) -> int:
    """Elements that one call of the inner optimizer steps at a time, and whose fp32 gradients it needs."""
    masked = local(model, settings, 1, only_masked=True)
    group = max(masked, local(model, settings, 1) - masked)
    return min(group, settings.sub_group) if settings.stage == 3 else group


def _largest_shard(model: Architecture, settings: Settings) -> int:
    """Elements of the largest part of one masked weight on this rank."""
    largest = max(parameter.numel for parameter in model.parameters if parameter.masked)
    if settings.stage == 3:
        return math.ceil(largest / settings.ranks)
    return min(largest, local(model, settings, 1, only_masked=True))
