"""Memory that lasts from step to step, in bytes of a rank.

It holds weights, masters, moments, the states of masks, gradients and the teacher; no activations.
"""

from __future__ import annotations

import dataclasses
import math

from sparseforge_ds.model.architecture import Architecture
from sparseforge_ds.train.memory_settings import MemorySettings

Kinds = dict[str, int]
"""Bytes of each kind of tensors, by its name."""

_MASK_BYTES = {"uint16": 2, "bool": 1, "float32": 4}


def model_states(model: Architecture, settings: MemorySettings, frozen: bool | None = None) -> Kinds:
    """Return the student's share of what lasts, on device or host, without gradients.

    Args:
        model: the student.
        settings: of the run.
        frozen: True for the time when masks are frozen, False while they move; None for the first of these times.
    """
    forge = settings.forge
    frozen = settings.always_frozen if frozen is None else frozen
    states = local(model, settings, 1)
    masked = local(model, settings, 1, only_masked=True)
    # Weights under a mask are always stepped in fp32.
    of_masked, of_others = settings.moments
    moments = 4 * of_masked * masked + (2 if settings.bf16_states else 4) * of_others * (states - masked)
    return {
        "weights": settings.low * local(model, settings, 3),
        "master": settings.of_master * states,
        "moments": 0 if forge.method.name == "maskllm" else moments,
        "dense": 0 if frozen and settings.of_master != 2 and forge.quantize is None else 4 * masked,
        "mask": 0 if frozen else _MASK_BYTES[forge.mask_storage] * masked,
        "curvature": 4 * masked if forge.keeps_elements and not frozen else 0,
        "curvature sums": math.ceil(4 * model.rows_and_columns / settings.ranks) if forge.keeps_sums else 0,
        "method states": 0 if frozen else 4 * masked * len(forge.method.state_keys(forge.parsed_pattern)),
        "kept bits": math.ceil(masked / 8) if frozen or forge.mask_storage == "uint16" else 0,
        "flip bits": 0 if frozen else math.ceil(masked / 8),
    }


def lasting(model: Architecture, settings: MemorySettings, teacher: Architecture | None = None) -> Kinds:
    """Return all that lasts on one rank, on device or host: states, gradients and the teacher."""
    gradients = settings.low * model.total if settings.stage < 2 else resident_gradients(model, settings)
    teacher_bytes = teacher_weights(teacher or model, settings) if settings.teacher else 0
    fp32_gradients = whole_gradients(model, settings)
    states = model_states(model, settings)
    return positive({**states, "gradients": gradients, "fp32 gradients": fp32_gradients, "teacher": teacher_bytes})


def resident_gradients(model: Architecture, settings: MemorySettings) -> int:
    """Return the bytes of gradients between the backward pass and the step."""
    if settings.stage == 0 or settings.whole_gradients:
        return settings.low * model.total
    return settings.gradient_bytes * local(model, settings, 1)


def whole_gradients(model: Architecture, settings: MemorySettings) -> int:
    """Return the bytes of the fp32 gradients in which DeepSpeed's BF16_Optimizer sums over micro-batches."""
    return 4 * model.total if settings.whole_gradients else 0


def teacher_weights(teacher: Architecture, settings: MemorySettings) -> int:
    """Return the bytes of a rank's part of a teacher."""
    if not settings.divided_teacher:
        return settings.low * teacher.total
    return settings.low * sum(math.ceil(parameter.numel / settings.ranks) for parameter in teacher.parameters)


def checkpoint_bytes(model: Architecture, settings: MemorySettings, frozen: bool | None = None) -> int:
    """Return the bytes of a checkpoint on disk: masters and optimizer states of all ranks, and undivided weights.

    Args:
        model: the model.
        settings: of the run.
        frozen: whether masks are frozen; None takes False, unless they are frozen before the first step.
    """
    frozen = settings.always_frozen if frozen is None else frozen
    kinds = model_states(model, dataclasses.replace(settings, ranks=1), frozen)
    states = sum(kinds[kind] for kind in ("moments", "dense", "mask", "curvature", "method states"))
    states += kinds["kept bits"] if frozen else 0
    if settings.forge.keeps_sums:  # as text, in every rank's copy of the client state
        states += math.ceil(4 * model.rows_and_columns * 4 / 3) * (settings.ranks if settings.stage == 3 else 1)
    return states + settings.of_master * model.total + (settings.low * model.total if settings.stage < 3 else 0)


def local(model: Architecture, settings: MemorySettings, from_stage: int, only_masked: bool = False) -> int:
    """Return the elements of this rank, padding included, of what ZeRO divides from `from_stage` on."""
    sizes = [parameter.numel for parameter in model.parameters if parameter.masked or not only_masked]
    if settings.stage < from_stage:
        return sum(sizes)
    if settings.stage == 3:
        return sum(math.ceil(size / settings.ranks) for size in sizes)
    return math.ceil(sum(sizes) / settings.ranks)


def positive(kinds: Kinds) -> Kinds:
    """Return the kinds that have bytes."""
    return {name: size for name, size in kinds.items() if size}
