"""Memory of one rank, by kind and by phase of a step. Bytes throughout.

Some tensors are there all the time. Others come and go, so that the peak is that of the worst phase: a micro-batch's
forward and backward pass, the optimizer's step, or a mask update with its probe.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from sparseforge_ds.extras.planner.activations import Activations
from sparseforge_ds.extras.planner.curvature import heard, probe
from sparseforge_ds.extras.planner.start import start_memory, streams_on_host
from sparseforge_ds.mask.kernels.chunks import CHUNK
from sparseforge_ds.model.architecture import Architecture
from sparseforge_ds.model.head import micro_batches_at_once
from sparseforge_ds.train.lasting_memory import (
    Kinds,
    kept_gradients,
    local,
    model_states,
    positive,
    teacher_weights,
    whole_gradients,
)
from sparseforge_ds.train.memory_settings import Settings

_MASK_SCRATCH = 32
"""Bytes an element of a piece of a shard that scores, gates and the flip count may take while it is updated."""
_WITH_OPTIMIZER = {"master", "moments", "dense", "mask", "curvature", "logits", "kept bits", "flip bits"}

Trace = Callable[[int, bool, bool], Activations]
"""`trace(micro_batch, checkpointing, heard)` of the model at hand; experts are heard in the last."""


@dataclass(frozen=True)
class Memory:
    """What one rank needs."""

    resident: Kinds
    """On the device, all the time."""
    host: Kinds
    """In the host's memory, for this rank."""
    phases: dict[str, Kinds]
    """On the device besides, while this happens."""
    reserve: int
    """For the driver's context, communication buffers and fragmentation; assumed, not derived."""
    frozen_peak: int
    """The most that the device must hold once masks are frozen; `peak` is of while they move, if they do."""

    @property
    def worst(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        """The most that the device must hold."""
        return sum(self.resident.values()) + sum(self.phases[self.worst].values()) + self.reserve

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
    """Add up a rank. The teacher is given when it is another model than the student; `reserve` is not to be planned
    with."""
    frozen = _memory(model, settings, trace, teacher or model, reserve, frozen=True)
    found = frozen if settings.always_frozen else _memory(model, settings, trace, teacher or model, reserve, False)
    return dataclasses.replace(found, frozen_peak=frozen.peak)


def _memory(
    model: Architecture, settings: Settings, trace: Trace, teacher: Architecture, reserve: int, frozen: bool
) -> Memory:
    low, zero3 = settings.low, settings.stage == 3
    device: Kinds = {}
    host: Kinds = {}
    for name, size in model_states(model, settings, frozen).items():
        hosted = settings.weights_on_host if name == "weights" else settings.optimizer_on_host
        (host if hosted and name in {"weights", *_WITH_OPTIMIZER} else device)[name] = size
    device["fp32 gradients"] = whole_gradients(model, settings)
    if zero3:
        device["persistent weights"] = _persistent(model, settings)
        device["gradient bucket"] = settings.bucket * low if settings.contiguous else 0
        (host if settings.optimizer_on_host else device)["gradients"] = kept_gradients(model, settings)
    if settings.teacher:
        hosted = settings.weights_on_host and settings.divided_teacher  # a replicated one is whole on every device
        (host if hosted else device)["teacher"] = teacher_weights(teacher, settings)
        device["teacher's persistent weights"] = _persistent(teacher, settings) if settings.divided_teacher else 0
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


def gathered_weights(model: Architecture, settings: Settings, backward: bool = True) -> int:
    """The most elements that ZeRO-3 has gathered at a time, without the persistent ones; rather too many than too few.

    There is the module that runs, beside it one of a block that is computed again, and what is used again within
    `max_reuse`, which reaches back from the turn between forward and backward. With a prefetch bucket DeepSpeed fetches
    ahead until `max_live` are there, and what is needed besides.
    """
    whole = sum(parameter.numel for parameter in model.parameters if parameter.numel > settings.persistence)
    needed = model.largest_module
    if backward:
        again = max(parameter.numel for parameter in model.parameters if parameter.masked)
        needed += settings.max_reuse // 2 + (again if settings.checkpointing else 0)
    ahead = settings.max_live + model.largest if settings.prefetch else 0
    return min(whole, max(needed, ahead))


def _gathering(model: Architecture, settings: Settings, backward: bool = True) -> Kinds:
    """The gathered weights, and the flat tensor in which an all-gather lands and from which they are copied."""
    copied = settings.ranks > 1 and not settings.sequential
    return {
        "gathered weights": gathered_weights(model, settings, backward) * settings.low,
        "gathering": model.largest_module * settings.low if copied else 0,
    }


def _persistent(model: Architecture, settings: Settings) -> int:
    """Bytes of the weights that ZeRO-3 keeps gathered on every rank."""
    return settings.low * sum(p.numel for p in model.parameters if p.numel <= settings.persistence)


def _phases(
    model: Architecture, settings: Settings, trace: Trace, teacher: Architecture, frozen: bool
) -> dict[str, Kinds]:
    scratch = _MASK_SCRATCH * min(_largest_shard(model, settings), CHUNK)
    listens = settings.forge.from_training_step and not frozen
    fused = any(experts > 1 for experts, *_ in model.matrices)

    def passed(heard: bool) -> Activations:
        return trace(settings.micro_batch, settings.checkpointing, heard and fused)

    activations = passed(listens)
    phases: dict[str, Kinds] = {}
    told: Kinds = {}
    if settings.teacher:
        tokens = settings.tokens_at_once
        held = 1 if activations.states else settings.accumulation
        together = min(held, micro_batches_at_once(tokens))
        told["teacher's hidden states"] = held * tokens * teacher.hidden * settings.low + activations.states
        gathering = _gathering(teacher, settings, backward=False) if settings.divided_teacher else {}
        phases["teacher"] = {**gathering, "activations": together * activations.teacher, **told}
        if settings.divided_teacher:  # the head is gathered once more, for the losses of a step
            told["teacher's head"] = teacher.vocabulary * teacher.hidden * settings.low
    passing = _passing(model, settings)
    listening = heard(model, settings) if listens else {}
    phases["forward and backward"] = {**passing, **_activations(activations), **told, **listening}
    phases["optimizer step"] = _step(model, settings, scratch, frozen)
    if not frozen or settings.always_frozen:
        by_token = settings.forge.importance == "fisher" and settings.forge.curvature.per_token
        of_probe = {**passing, **_activations(passed(by_token))}
        phases["mask update"] = _update(model, settings, of_probe, scratch)
    return phases


def _passing(model: Architecture, settings: Settings) -> Kinds:
    """What a pass needs besides activations: gathered weights, or gradients that ZeRO has not divided yet."""
    if settings.stage == 3:
        return _gathering(model, settings)
    kept = 0 if settings.optimizer_on_host else kept_gradients(model, settings)
    passing = {"gradients": settings.low * model.total if settings.stage < 2 else kept}
    if settings.whole_gradients:
        return passing
    if settings.stage == 1:
        passing["reduced gradients"] = kept
    if settings.stage and settings.contiguous:
        passing["gradient bucket"] = settings.bucket * settings.low * (2 if settings.overlapped else 1)
    return passing


def _activations(activations: Activations) -> Kinds:
    """Split a peak into what causes it."""
    if activations.saved + activations.loss < activations.backward:
        return {"activations": activations.backward}
    return {
        "activations": activations.saved,
        "logits": activations.logits,
        "loss": activations.loss - activations.logits,
    }


def _step(model: Architecture, settings: Settings, scratch: int, frozen: bool) -> Kinds:
    if settings.optimizer_on_host:
        return {}
    masked = local(model, settings, 1, only_masked=True)
    # What one call of the inner optimizer steps, and whose fp32 gradients it needs.
    group = max(masked, local(model, settings, 1) - masked)
    if settings.stage == 3:
        group = min(group, settings.sub_group)
    elif settings.stage == 0:
        group = model.total if settings.low == 2 else model.largest
    # With bf16 states DeepSpeed hands over gradients in bf16, which are cast for the dense weights.
    of_gradient = 6 if settings.bf16_states else 4
    if settings.whole_gradients or (settings.stage == 0 and settings.low == 4):
        of_gradient = 0
    gradients = {"gradients": 0 if settings.stage == 3 else kept_gradients(model, settings)}
    stepped = {
        **gradients,
        "fp32 gradients": of_gradient * group,
        "weights before the step": _before_step(model, settings, frozen),
        # A root of the second moment, and its quotient, in torch's plain loop.
        "optimizer's temporaries": 0 if settings.fused_optimizer else 8 * group,
        "mask's temporaries": scratch,
    }
    # Before anything else of a step is there, ZeRO flattens 16-bit gradients, and casts what it has flattened.
    flattens = settings.stage > 0 and settings.gradient_bytes == 2 and not settings.bf16_states
    cast = {**gradients, "flat gradients": 2 * group * flattens, "fp32 gradients": of_gradient * group}
    return max(stepped, cast, key=lambda kinds: sum(kinds.values()))


def _before_step(model: Architecture, settings: Settings, frozen: bool) -> int:
    """Return the bytes of W before a step of one call of the inner optimizer, of which the mask takes a share."""
    soft = settings.forge.soft
    # A master in fp32 has room for these weights, one in bf16 has none.
    if frozen or settings.of_master != 2 or soft is None or soft.straight_through:
        return 0
    masked = local(model, settings, 1, only_masked=True)
    return 4 * (min(masked, settings.sub_group) if settings.stage == 3 else masked)


def _update(model: Architecture, settings: Settings, of_probe: Kinds, scratch: int) -> Kinds:
    """A mask update; scores and gates come after the passes of a probe, where there is one: like those of training."""
    if settings.forge.from_training_step:
        # What was heard and its fp32 copy, the numbers that each matrix's are divided and averaged by, and the mean.
        return {"row and column sums": 20 * model.rows_and_columns, "mask's temporaries": scratch}
    if not settings.forge.keeps_curvature:
        return {"mask's temporaries": scratch}
    return {**of_probe, **probe(model, settings, _largest_shard(model, settings))}


def _largest_shard(model: Architecture, settings: Settings) -> int:
    """Elements of the largest part of one masked weight on this rank."""
    largest = max(parameter.numel for parameter in model.parameters if parameter.masked)
    if settings.stage == 3:
        return math.ceil(largest / settings.ranks)
    return min(largest, local(model, settings, 1, only_masked=True))
