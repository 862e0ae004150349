"""Floating-point operations of a run, and how long a machine takes for them at a stated utilisation.

A matrix element costs two operations a token forward and four backward; causal attention adds half of its square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparseforge_ds.planning.architecture import Architecture
from sparseforge_ds.planning.settings import Settings

PEAK_TFLOPS = {"a100": 312.0, "h100": 989.0, "h200": 989.0, "b200": 2250.0, "l40s": 362.0, "v100": 125.0}
"""Dense 16-bit tensor-core peaks of the manufacturer's data sheets, SXM where there are several."""


@dataclass(frozen=True)
class Duration:
    """A token budget on a machine."""

    steps: int
    tokens_per_step: int
    flops: dict[str, float]
    """Of one optimizer step on all ranks, averaged over the run, by what it is for."""
    seconds_per_step: float
    hours: float


def forward_flops(model: Architecture, seq_length: int) -> float:
    """Of one token in a forward pass, head included."""
    return 2.0 * model.multiplied + seq_length * model.attended  # 2 * S, half of it causal


def duration(
    model: Architecture, settings: Settings, teacher: Architecture | None, *, tokens: int, tflops: float, mfu: float
) -> Duration:
    """Steps and hours of a run.

    Args:
        tokens: training tokens of the whole run.
        tflops: peak of one GPU in the dtype of the run, in 10^12 operations a second.
        mfu: share of the peak that a run reaches, counted over all operations named here, recomputed ones included.
    """
    batch, length = settings.tokens_per_step, settings.seq_length
    forward = forward_flops(model, length) * batch
    flops = {
        "forward": forward,
        "backward": 2 * forward,
        "recomputed forward": forward if settings.checkpointing else 0.0,
        "teacher": forward_flops(teacher or model, length) * batch if settings.teacher else 0.0,
        "mask updates": forward * _probes(settings),
    }
    flops = {name: count for name, count in flops.items() if count}
    steps = math.ceil(tokens / batch)
    seconds = sum(flops.values()) / (settings.ranks * tflops * 1e12 * mfu)
    return Duration(steps, batch, flops, seconds, seconds * steps / 3600)


def _probes(settings: Settings) -> float:
    """Operations of the probes of an average step, as a multiple of a forward pass over its batch."""
    forge = settings.forge
    # Of other methods, only a starting mask is measured.
    if forge.method.name != "sparseforge" or forge.listens or not forge.keeps_curvature or not forge.max_steps:
        return 0.0
    schedule, sequences = forge.resolved_schedule, forge.curvature.sequences
    moving = schedule.freeze_step / forge.max_steps / max(1, schedule.update_every)
    of_batch = 1.0 if sequences is None else sequences * settings.seq_length / settings.tokens_per_step
    passes = 2 if forge.importance == "hutchinson" else 1
    each = 1 if forge.importance == "wanda" else 3 + settings.checkpointing  # a forward pass alone, or with a backward
    return passes * each * forge.curvature.probes * of_batch * moving
