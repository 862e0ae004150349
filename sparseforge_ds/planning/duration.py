"""Floating-point operations of a run, and how long a machine takes for them at a stated utilisation.

A matrix element costs two operations a token forward and four backward; causal attention adds half of its square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sparseforge_ds.planning.architecture import Architecture, Sizes
from sparseforge_ds.planning.settings import Settings
from sparseforge_ds.planning.states import model_states
from sparseforge_ds.planning.traffic import probe_passes

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

    @property
    def flops_per_step(self) -> float:
        """Of all ranks."""
        return sum(self.flops.values())


def forward_flops(model: Architecture, seq_length: int) -> float:
    """Of one token in a forward pass, head included."""
    attention = seq_length * (model.score_width + model.value_width) * model.layers  # 2 * S, half of it causal
    return 2.0 * model.multiplied + attention


def duration(
    model: Architecture,
    settings: Settings,
    *,
    tokens: int,
    tflops: float,
    mfu: float,
    teacher: Architecture | None = None,
) -> Duration:
    """Steps and hours of a run.

    Args:
        model: the student.
        settings: how it is laid out.
        tokens: training tokens of the whole run.
        tflops: peak of one GPU in the dtype of the run, in 10^12 operations a second.
        mfu: share of the peak that a run reaches, counted over all operations named here, recomputed ones included.
        teacher: the teacher, when it is another model than the student.
    """
    batch = settings.tokens_per_step
    steps = math.ceil(tokens / batch)
    forward = forward_flops(model, settings.seq_length)
    flops = {"forward": forward * batch, "backward": 2 * forward * batch}
    if settings.checkpointing:
        flops["recomputed forward"] = forward * batch
    if settings.teacher:
        flops["teacher"] = forward_flops(teacher or model, settings.seq_length) * batch
    passes, backward = probe_passes(settings)
    schedule = settings.forge.resolved_schedule
    share = schedule.freeze_step / settings.forge.max_steps if settings.forge.max_steps else 0.0
    probed = settings.micro_batch * settings.ranks * settings.seq_length * share / max(1, schedule.update_every)
    if passes:
        per_token = forward * (passes + (2 + settings.checkpointing) * backward)
        squared = settings.forge.importance in ("fisher", "gauss_newton") and settings.forge.curvature.per_token
        if squared and settings.forge.keeps_elements:
            used = (math.prod(s) * (1 if len(s) == 2 else model.expert_share) for s in model.masked_shapes)
            per_token += 2.0 * sum(used) * backward
        flops["mask updates"] = per_token * probed
    seconds = sum(flops.values()) / (settings.ranks * tflops * 1e12 * mfu)
    return Duration(steps, batch, flops, seconds, seconds * steps / 3600)


_SAVED = ("moments", "dense", "mask", "curvature", "logits")
"""Of what lasts, the optimizer states."""


def checkpoint_bytes(model: Sizes, settings: Settings, frozen: bool = False) -> int:
    """On disk, of all ranks: masters, optimizer states, and the weights where ZeRO does not divide them.

    Args:
        model: the student.
        settings: how it is laid out.
        frozen: once masks are frozen, else while they move.
    """
    states = sum(model_states(model, replace(settings, ranks=1), frozen)[kind] for kind in _SAVED)
    if settings.forge.keeps_sums:  # as text, in every rank's copy of the client state
        states += math.ceil(4 * model.rows_and_columns * 4 / 3) * (settings.ranks if settings.stage == 3 else 1)
    return states + settings.of_master * model.total + (settings.low * model.total if settings.stage < 3 else 0)
