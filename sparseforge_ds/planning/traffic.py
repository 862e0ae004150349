"""What the collectives of one optimizer step carry, as bytes of the tensors that every rank puts in or takes out.

A ring moves (N - 1) / N of such a tensor through every rank's link for an all-gather or a reduce-scatter, and twice
that for an all-reduce, which is counted twice here for that reason. Mask updates are divided by the steps between two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparseforge_ds.planning.architecture import Architecture, is_expert
from sparseforge_ds.planning.memory import teacher_gathered, teacher_head, teacher_passes, weights_gathered
from sparseforge_ds.planning.settings import Settings

_PASSES = {"hutchinson": 2, "gauss_newton": 1, "fisher": 1, "wanda": 1, "magnitude": 0}
"""Forward passes of one probe, each with a backward pass except wanda's."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per rank and optimizer step. All zero on one rank."""

    training: dict[str, int]
    """What DeepSpeed moves without us."""
    ours: dict[str, int]
    """What the method adds: the teacher, and the average of mask updates while masks still move."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.training.values()) + sum(self.ours.values())


def probe_passes(settings: Settings) -> tuple[int, int]:
    """(forward, backward) passes of its own over a micro-batch in one mask update."""
    if settings.forge.method != "sparseforge" or settings.forge.listens:
        return 0, 0  # of other methods, only a starting mask is measured
    forward = _PASSES[settings.forge.importance] * settings.forge.curvature.probes * settings.probe_passes
    return forward, 0 if settings.forge.importance == "wanda" else forward


def traffic(model: Architecture, settings: Settings, teacher: Architecture | None = None) -> Traffic:
    """Count the collectives of a step.

    Args:
        model: the student.
        settings: how it is laid out.
        teacher: the teacher, when it is another model than the student.
    """
    if settings.ranks == 1:
        return Traffic({}, {})
    every = settings.forge.resolved_schedule.update_every
    gathered, reduced, published = micro_batch(model, settings)
    training = {
        "weights gathered": gathered * settings.accumulation + published,
        "gradients reduced": reduced * (settings.accumulation if settings.stage >= 2 else 1),
    }
    told = teacher_gathered(teacher or model, settings).moved * settings.low * teacher_passes(settings)[0]
    ours = {"teacher gathered": told + teacher_head(teacher or model, settings)}
    forward, backward = probe_passes(settings)
    if settings.forge.method == "sparseforge" and settings.forge.resolved_schedule.freeze_step:
        # A probe ends in DeepSpeed's own step; one that displaces weights does so before, and puts them back at last.
        at_outputs = settings.forge.importance == "hutchinson" and settings.forge.curvature.per_token
        steps = backward if at_outputs else backward // settings.probe_passes
        pushes = published * (2 * steps + 1 if settings.displaces_weights else steps)
        if not backward:
            gathered = weights_gathered(model, settings, backward=False).moved * settings.low
        leaves = settings.stage == 3 and any(is_expert(parameter.name) for parameter in model.parameters)
        if settings.forge.curvature.per_token and not leaves:  # taps see all: weights get no gradients, nothing steps
            reduced = steps = pushes = 0
        probe = gathered * forward + reduced * (backward if settings.stage >= 2 else steps) + pushes
        ours["probe"] = probe // every
        ours["curvature reduced"] = _curvature(model, settings) // every
        if settings.forge.factored and settings.forge.keeps_elements and settings.stage:
            ours["curvature's sums"] = 2 * 8 * model.rows_and_columns // every
        ours["masks published"] = published // every
    return Traffic(_positive(training), _positive(ours))


def micro_batch(model: Architecture, settings: Settings) -> tuple[int, int, int]:
    """Bytes of (weights gathered in a micro-batch, gradients reduced in one, weights gathered by a step)."""
    total, low = model.total, settings.low
    if settings.stage == 3:
        gathering = weights_gathered(model, settings)
        return gathering.moved * low, total * low, gathering.persistent * low
    # Stages 1 and 2 reduce a bucket by an all-reduce and keep a part of it.
    return 0, 2 * total * low, total * low if settings.stage else 0


def _curvature(model: Architecture, settings: Settings) -> int:
    """Full-size fp32 sums of squares, reduced a layer at a time, or vectors: row and column sums, or Wanda's."""
    probes = settings.forge.curvature.probes
    if settings.forge.importance == "wanda":
        columns = ((shape[0 if model.input_first else -1] + 1) * math.prod(shape[:-2]) for shape in model.masked_shapes)
        return 2 * 4 * sum(columns)
    if settings.forge.keeps_sums:
        return 2 * 4 * model.rows_and_columns  # reduced to slices, and gathered from them
    if settings.forge.importance not in ("fisher", "gauss_newton") or not settings.forge.curvature.per_token:
        return 0
    elements = sum(math.prod(shape) for shape in model.masked_shapes)
    return 4 * elements * probes * settings.probe_passes * (2 if settings.stage == 0 else 1)


def _positive(kinds: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in kinds.items() if size}
