"""Memory of one rank in bytes, by kind and by phase of a step.

Some tensors exist all the time. Others come and go, and the peak is that of the worst phase: a micro-batch's forward
and backward pass, the optimizer's step, or a mask update with its probe.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from sparseforge_ds.extras.planner.activation_memory import Activations
from sparseforge_ds.extras.planner.curvature_memory import probe_memory, training_step_memory
from sparseforge_ds.extras.planner.start import start_memory, streams_on_host
from sparseforge_ds.mask.kernels.chunks import CHUNK
from sparseforge_ds.model.architecture import Architecture
from sparseforge_ds.model.head import micro_batches_at_once
from sparseforge_ds.train.lasting_memory import (
    Kinds,
    local,
    model_states,
    positive,
    resident_gradients,
    teacher_weights,
    whole_gradients,
)
from sparseforge_ds.train.memory_settings import MemorySettings

_MASK_SCRATCH = 32
"""Bytes for each element of a chunk of a shard that scores, gates and the flip count take during an update."""
_WITH_OPTIMIZER = {"master", "moments", "dense", "mask", "curvature", "method states", "kept bits", "flip bits"}
"""Kinds of memory that are on the host if the optimizer's state is."""

Trace = Callable[[int, bool, bool], Activations]
"""Function (micro_batch, checkpointing, expert_hooks) that traces the model's pass."""


@dataclass(frozen=True)
class Memory:
    """Memory of one rank."""

    resident: Kinds
    """Bytes on the device, all the time."""
    host: Kinds
    """Bytes in the host's memory, for this rank."""
    phases: dict[str, Kinds]
    """Further bytes on the device during each phase."""
    reserve: int
    """Bytes for the driver's context, communication buffers and fragmentation; assumed, not derived."""
    frozen_peak: int
    """Peak on the device once masks are frozen; `peak` is that while they move, if they do."""

    @property
    def worst(self) -> str:
        """Phase with the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        """Largest number of bytes on the device."""
        return sum(self.resident.values()) + sum(self.phases[self.worst].values()) + self.reserve

    @property
    def host_total(self) -> int:
        """Sum of `host`."""
        return sum(self.host.values())


def memory(
    model: Architecture,
    settings: MemorySettings,
    trace: Trace,
    *,
    teacher: Architecture | None = None,
    reserve: int = 0,
) -> Memory:
    """Add up the memory of a rank.

    Args:
        model: the student.
        settings: the run, as far as memory depends on it.
        trace: traces a pass of the student.
        teacher: the teacher, if it is another model than the student.
        reserve: bytes that the plan leaves free.
    """
    frozen = _memory(model, settings, trace, teacher or model, reserve, frozen=True)
    moving = frozen if settings.always_frozen else _memory(model, settings, trace, teacher or model, reserve, False)
    return dataclasses.replace(moving, frozen_peak=frozen.peak)


def _memory(
    model: Architecture, settings: MemorySettings, trace: Trace, teacher: Architecture, reserve: int, frozen: bool
) -> Memory:
    """Add up the memory of a rank while masks move, or once they are frozen."""
    low = settings.low
    zero3 = settings.stage == 3
    device: Kinds = {}
    host: Kinds = {}
    # States of the model, on the device or offloaded.
    for name, size in model_states(model, settings, frozen).items():
        on_host = settings.weights_on_host if name == "weights" else settings.optimizer_on_host
        (host if on_host and name in {"weights", *_WITH_OPTIMIZER} else device)[name] = size
    device["fp32 gradients"] = whole_gradients(model, settings)
    # DeepSpeed's BF16_Optimizer has whole gradients on every rank, which are masked by the bits of all ranks.
    if frozen and settings.whole_gradients:
        device["kept bits"] += math.ceil(sum(parameter.numel for parameter in model.parameters if parameter.masked) / 8)
    if zero3:
        device["persistent weights"] = _persistent(model, settings)
        device["gradient bucket"] = settings.bucket * low if settings.contiguous else 0
        (host if settings.optimizer_on_host else device)["gradients"] = resident_gradients(model, settings)
    # The teacher; a replicated one is complete on every device.
    if settings.teacher:
        on_host = settings.weights_on_host and settings.divided_teacher
        (host if on_host else device)["teacher"] = teacher_weights(teacher, settings)
        device["teacher's persistent weights"] = _persistent(teacher, settings) if settings.divided_teacher else 0
    # Buffers of an offloaded optimizer.
    if settings.optimizer_on_host:
        host["fp32 gradients"] = 4 * local(model, settings, 1)
        host["weights before the step"] = _before_step(model, settings, frozen)
        if not zero3:
            device["gradient staging"] = model.largest * low
            host["weights to copy"] = local(model, settings, 1) * low
        if settings.stage == 2 and settings.accumulation > 1:
            host["accumulated gradients"] = local(model, settings, 1) * low
    phases = _phases(model, settings, trace, teacher, frozen)
    if settings.forge.starts_by_block:
        phases["start"] = start_memory(model, settings)
        host["start's streams"] = streams_on_host(model, settings)
    return Memory(positive(device), positive(host), {n: positive(k) for n, k in phases.items()}, reserve, 0)


def gathered_weights(model: Architecture, settings: MemorySettings, backward: bool = True) -> int:
    """Return an upper estimate of the elements that ZeRO-3 has gathered at a time, without the persistent ones.

    They are the module that runs, one weight of a block that is recomputed, and weights that are used again within
    `max_reuse`, which spans the end of the forward and the beginning of the backward pass. With a prefetch bucket
    DeepSpeed fetches ahead until `max_live` elements are gathered, besides those that it needs.
    """
    divided = sum(parameter.numel for parameter in model.parameters if parameter.numel > settings.persistence)
    needed = model.largest_module
    if backward:
        recomputed = max(parameter.numel for parameter in model.parameters if parameter.masked)
        needed += settings.max_reuse // 2 + (recomputed if settings.checkpointing else 0)
    ahead = settings.max_live + model.largest if settings.prefetch else 0
    return min(divided, max(needed, ahead))


def _gathering(model: Architecture, settings: MemorySettings, backward: bool = True) -> Kinds:
    """Return the gathered weights, and the flat output of an all-gather from which they are copied."""
    copied = settings.ranks > 1 and not settings.sequential
    return {
        "gathered weights": gathered_weights(model, settings, backward) * settings.low,
        "gathering": model.largest_module * settings.low if copied else 0,
    }


def _persistent(model: Architecture, settings: MemorySettings) -> int:
    """Return the bytes of the weights that ZeRO-3 keeps gathered on every rank."""
    return settings.low * sum(p.numel for p in model.parameters if p.numel <= settings.persistence)


def _phases(
    model: Architecture, settings: MemorySettings, trace: Trace, teacher: Architecture, frozen: bool
) -> dict[str, Kinds]:
    """Return the temporary memory of every phase of a step."""
    scratch = _MASK_SCRATCH * min(_largest_shard(model, settings), CHUNK)
    measures = settings.forge.from_training_step and not frozen
    fused = any(experts > 1 for experts, *_ in model.matrices)

    def traced(expert_hooks: bool) -> Activations:
        return trace(settings.micro_batch, settings.checkpointing, expert_hooks and fused)

    # A teacher runs before the student, over several micro-batches at once, and its hidden states stay.
    activations = traced(measures)
    phases: dict[str, Kinds] = {}
    targets: Kinds = {}
    if settings.teacher:
        tokens = settings.tokens_at_once
        waiting = 1 if activations.states else settings.accumulation
        together = min(waiting, micro_batches_at_once(tokens))
        targets["teacher's hidden states"] = waiting * tokens * teacher.hidden * settings.low + activations.states
        gathering = _gathering(teacher, settings, backward=False) if settings.divided_teacher else {}
        phases["teacher"] = {**gathering, "activations": together * activations.teacher, **targets}
        if settings.divided_teacher:  # the head is gathered once more, for the losses of a step
            targets["teacher's head"] = teacher.vocabulary * teacher.hidden * settings.low
    # The student's passes, and the optimizer.
    buffers = _pass_buffers(model, settings)
    measuring = training_step_memory(model, settings) if measures else {}
    phases["forward and backward"] = {**buffers, **_activations(activations), **targets, **measuring}
    phases["optimizer step"] = _step(model, settings, scratch, frozen)
    # A mask update, after the passes of its probe.
    if not frozen or settings.always_frozen:
        by_token = settings.forge.importance == "fisher" and settings.forge.curvature.per_token
        probe_pass = {**buffers, **_activations(traced(by_token))}
        phases["mask update"] = _update(model, settings, probe_pass, scratch)
    return phases


def _pass_buffers(model: Architecture, settings: MemorySettings) -> Kinds:
    """Return the buffers of a pass besides activations: gathered weights, or gradients before ZeRO divides them."""
    if settings.stage == 3:
        return _gathering(model, settings)
    gradients = 0 if settings.optimizer_on_host else resident_gradients(model, settings)
    buffers = {"gradients": settings.low * model.total if settings.stage < 2 else gradients}
    if settings.whole_gradients:
        return buffers
    if settings.stage == 1:
        buffers["reduced gradients"] = gradients
    if settings.stage and settings.contiguous:
        buffers["gradient bucket"] = settings.bucket * settings.low * (2 if settings.overlapped else 1)
    return buffers


def _activations(activations: Activations) -> Kinds:
    """Split the peak of a pass into its kinds."""
    if activations.saved + activations.loss < activations.backward:
        return {"activations": activations.backward}
    return {
        "activations": activations.saved,
        "logits": activations.logits,
        "loss": activations.loss - activations.logits,
    }


def _step(model: Architecture, settings: MemorySettings, scratch: int, frozen: bool) -> Kinds:
    """Return the temporary memory of the optimizer's step on the device."""
    if settings.optimizer_on_host:
        return {}
    masked = local(model, settings, 1, only_masked=True)
    # The elements of one call of the inner optimizer, which needs their fp32 gradients.
    group = max(masked, local(model, settings, 1) - masked)
    if settings.stage == 3:
        group = min(group, settings.sub_group)
    elif settings.stage == 0:
        group = model.total if settings.low == 2 else model.largest
    # With bf16 states DeepSpeed hands over gradients in bf16, which are cast for the dense weights.
    gradient_bytes = 6 if settings.bf16_states else 4
    if settings.whole_gradients or (settings.stage == 0 and settings.low == 4):
        gradient_bytes = 0
    gradients = {"gradients": 0 if settings.stage == 3 else resident_gradients(model, settings)}
    stepped = {
        **gradients,
        "fp32 gradients": gradient_bytes * group,
        "weights before the step": _before_step(model, settings, frozen),
        # torch's plain loop keeps the root of the second moment, and the quotient.
        "optimizer's temporaries": 0 if settings.fused_optimizer else 8 * group,
        "mask's temporaries": scratch,
    }
    # At the beginning of a step, ZeRO flattens 16-bit gradients, and casts the flat tensor.
    flattens = settings.stage > 0 and settings.gradient_bytes == 2 and not settings.bf16_states
    cast = {**gradients, "flat gradients": 2 * group * flattens, "fp32 gradients": gradient_bytes * group}
    return max(stepped, cast, key=lambda kinds: sum(kinds.values()))


def _before_step(model: Architecture, settings: MemorySettings, frozen: bool) -> int:
    """Return the bytes of W before the step, which a soft mask needs, for one call of the inner optimizer."""
    soft = settings.forge.soft
    # An fp32 master needs no copy of them, a bf16 master does.
    if frozen or settings.of_master != 2 or soft is None or soft.straight_through:
        return 0
    masked = local(model, settings, 1, only_masked=True)
    return 4 * (min(masked, settings.sub_group) if settings.stage == 3 else masked)


def _update(model: Architecture, settings: MemorySettings, probe_pass: Kinds, scratch: int) -> Kinds:
    """Return the temporary memory of a mask update; scores and gates come after the passes of a probe, if any."""
    if settings.forge.from_training_step:
        # The fp64 sums, their fp32 copy, divisors and weights of each matrix, and the running mean.
        return {"row and column sums": 20 * model.rows_and_columns, "mask's temporaries": scratch}
    if not settings.forge.keeps_curvature:
        return {"mask's temporaries": scratch}
    return {**probe_pass, **probe_memory(model, settings, _largest_shard(model, settings))}


def _largest_shard(model: Architecture, settings: MemorySettings) -> int:
    """Return the elements of the largest part of one masked weight on a rank."""
    largest = max(parameter.numel for parameter in model.parameters if parameter.masked)
    if settings.stage == 3:
        return math.ceil(largest / settings.ranks)
    return min(largest, local(model, settings, 1, only_masked=True))
