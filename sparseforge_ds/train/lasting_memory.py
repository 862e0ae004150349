"""What lasts from step to step, in bytes of a rank: weights, masters, moments, our numbers, gradients, the teacher."""

from __future__ import annotations

import dataclasses
import math

from sparseforge_ds.model.architecture import Architecture
from sparseforge_ds.train.memory_settings import Settings

Kinds = dict[str, int]

_MASK_BYTES = {"uint16": 2, "bool": 1, "float32": 4}


def model_states(model: Architecture, settings: Settings, frozen: bool | None = None) -> Kinds:
    """What lasts from step to step and belongs to the student, wherever it lies, without gradients. For the time
    when masks are frozen, or else while they move; None: while they move, if they do in training."""
    forge = settings.forge
    frozen = settings.always_frozen if frozen is None else frozen
    states, masked = local(model, settings, 1), local(model, settings, 1, only_masked=True)
    # Weights under a mask are always stepped in fp32.
    moments = 8 * masked + (4 if settings.bf16_states else 8) * (states - masked)
    return {
        "weights": settings.low * local(model, settings, 3),
        "master": settings.of_master * states,
        "moments": 0 if forge.method.name == "maskllm" else moments,
        "dense": 0 if frozen and settings.of_master == 4 else 4 * masked,
        "mask": 0 if frozen else _MASK_BYTES[forge.mask_storage] * masked,
        "curvature": 4 * masked if forge.keeps_elements and not frozen else 0,
        "curvature sums": math.ceil(4 * model.rows_and_columns / settings.ranks) if forge.keeps_sums else 0,
        "logits": 0 if frozen else 4 * masked * sum("logit" in key for key in forge.state_keys),
        "kept bits": math.ceil(masked / 8) if frozen or forge.mask_storage == "uint16" else 0,
        "flip bits": 0 if frozen else math.ceil(masked / 8),
    }


def lasting(model: Architecture, settings: Settings, teacher: Architecture | None = None) -> Kinds:
    """What one rank holds from step to step, wherever it lies: states, gradients and the teacher; no activations."""
    gradients = settings.low * model.total if settings.stage < 2 else kept_gradients(model, settings)
    held = teacher_weights(teacher or model, settings) if settings.teacher else 0
    whole = whole_gradients(model, settings)
    return positive({**model_states(model, settings), "gradients": gradients, "fp32 gradients": whole, "teacher": held})


def kept_gradients(model: Architecture, settings: Settings) -> int:
    """Bytes of gradients between the backward pass and the step."""
    if settings.stage == 0 or settings.whole_gradients:
        return settings.low * model.total
    return settings.gradient_bytes * local(model, settings, 1)


def whole_gradients(model: Architecture, settings: Settings) -> int:
    """Bytes of the fp32 gradients that DeepSpeed's BF16_Optimizer adds those of every micro-batch to."""
    return 4 * model.total if settings.whole_gradients else 0


def teacher_weights(teacher: Architecture, settings: Settings) -> int:
    """Bytes of a rank's part of a teacher."""
    if not settings.divided_teacher:
        return settings.low * teacher.total
    return settings.low * sum(math.ceil(parameter.numel / settings.ranks) for parameter in teacher.parameters)


def checkpoint_bytes(model: Architecture, settings: Settings, frozen: bool = False) -> int:
    """On disk, of all ranks: masters, optimizer states, and the weights where ZeRO does not divide them."""
    found = model_states(model, dataclasses.replace(settings, ranks=1), frozen)
    states = sum(found[kind] for kind in ("moments", "dense", "mask", "curvature", "logits"))
    if settings.forge.keeps_sums:  # as text, in every rank's copy of the client state
        states += math.ceil(4 * model.rows_and_columns * 4 / 3) * (settings.ranks if settings.stage == 3 else 1)
    return states + settings.of_master * model.total + (settings.low * model.total if settings.stage < 3 else 0)


def local(model: Architecture, settings: Settings, from_stage: int, only_masked: bool = False) -> int:
    """Elements of this rank, padding included, of what ZeRO divides from `from_stage` on."""
    sizes = [parameter.numel for parameter in model.parameters if parameter.masked or not only_masked]
    if settings.stage < from_stage:
        return sum(sizes)
    if settings.stage == 3:
        return sum(math.ceil(size / settings.ranks) for size in sizes)
    return math.ceil(sum(sizes) / settings.ranks)


def positive(kinds: Kinds) -> Kinds:
    """Without the kinds that there is nothing of."""
    return {name: size for name, size in kinds.items() if size}
