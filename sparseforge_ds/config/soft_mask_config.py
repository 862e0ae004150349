"""Settings of SparseForge's own method, and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from typing_extensions import override

from sparseforge_ds.config.method_config import MethodConfig, Ramp, require_key, require_ramp, require_updates
from sparseforge_ds.mask.anneal import Schedule, StepRamp

UPDATES = 15
"""Approximate number of mask updates until masks freeze, by default. Rates act once an update, so with a fixed number
masks take the same course in runs of any length."""


@dataclass(frozen=True)
class SoftMaskConfig(MethodConfig):
    """SparseForge: soft masks by curvature, annealed until they are binary, then projected and frozen.

    Times are fractions of `max_steps`, so that a preset fits every run length. docs/concepts/schedule.md shows the
    course of every number.
    """

    name: Literal["sparseforge"] = "sparseforge"
    threshold: Literal["midpoint", "nth"] = "midpoint"
    """tau of the soft gate (eq. 5): `midpoint` of the N-th and (N+1)-th largest score, or the `nth`, as in the
    paper."""
    update_every: int | None = None
    """Optimizer steps between two mask updates, T_update; null: as many as give about 15 updates until masks freeze, in
    a run of any length, since `mask_rate` and `curvature.decay` act once an update."""
    temperature: float = 1.0
    """Initial temperature T0 of the soft gate (eq. 5), in standard deviations of the score."""
    temperature_min: float = 0.05
    """Lowest temperature, T_min."""
    temperature_decay: float | None = None
    """Factor gamma of the temperature per mask update; null: the one that reaches T_min when hardening ends."""
    blend: Ramp = (0.0, 0.1)
    """Ramp over which beta rises from 0 to 1 as a smooth step (eq. 7)."""
    mid_penalty: float = 0.3
    """Final value of lambda_mid (eq. 8)."""
    mid_penalty_ramp: Ramp = (0.0, 0.1)
    """Ramp over which lambda_mid rises linearly from 0."""
    penalty_rate: float = 0.2
    """Rate eta of the penalty (eq. 8)."""
    mask_rate: float = 0.1
    """Share alpha of the gate that enters the mask at an update (eq. 9)."""
    hardening: Ramp = (0.0, 0.2)
    """Ramp over which x falls from 1 to 0 (eq. 10). At its end masks are projected and frozen (eq. 11). [0, 0]
    freezes masks before the first step, which leaves plain retraining under a fixed mask."""
    straight_through: bool = False
    """Move W by the optimizer's whole step while masks are soft, as in the paper. false: move it by m_eff times the
    step, so that weights on their way out do not wander off by gradients that change nothing."""
    hard: bool = False
    """Set x = 0 from the first update on, so that the network only ever sees hard(m); for comparison."""
    starts_from: ClassVar[dict[str, Any]] = {}
    reads: ClassVar[tuple[str, ...]] = ("importance", "curvature", "start", "distillation", "low_rank")

    def __post_init__(self) -> None:
        require_key(
            self, "update_every", self.update_every is None or self.update_every >= 1, "use null or an integer >= 1"
        )
        require_key(self, "temperature_min", self.temperature_min > 0, "use a value > 0")
        floor = self.temperature_min
        require_key(self, "temperature", self.temperature >= floor, f"use at least temperature_min = {floor}")
        decay = self.temperature_decay
        require_key(self, "temperature_decay", decay is None or 0 < decay <= 1, "use null or 0 < gamma <= 1")
        for key in ("blend", "mid_penalty_ramp", "hardening"):
            require_ramp(self, key)
        for key in ("mid_penalty", "penalty_rate"):
            require_key(self, key, getattr(self, key) >= 0, "use a value >= 0")
        require_key(self, "mask_rate", 0 < self.mask_rate <= 1, "use 0 < alpha <= 1")

    @override
    def schedule(self, max_steps: int) -> Schedule:
        """Return the schedule in steps: every fraction times `max_steps`, rounded.

        Masks freeze at step 2 or later, so that short runs do what long ones do.
        """
        start, stop = _steps(self.hardening, max_steps)
        if self.hardening[1] > 0:  # a ramp that a short run rounds away still has room for one update
            stop = min(max(stop, 2), max_steps)
        return Schedule(
            update_every=max(1, stop // UPDATES) if self.update_every is None else self.update_every,
            freeze_step=stop,
            temperature=self.temperature,
            temperature_min=self.temperature_min,
            temperature_decay=self.temperature_decay,
            blend=_steps(self.blend, max_steps),
            mid_penalty=self.mid_penalty,
            mid_penalty_ramp=_steps(self.mid_penalty_ramp, max_steps),
            penalty_rate=self.penalty_rate,
            mask_rate=self.mask_rate,
            hardening_start=min(start, stop),
            hard=self.hard,
        )

    @override
    def check_length(self, max_steps: int) -> None:
        schedule = self.schedule(max_steps)
        if schedule.freeze_step:
            fixed = "or use hardening [0, 0] for a fixed mask"
            every = schedule.update_every
            require_updates(max_steps, schedule, "update_every", every, every + 1, self.hardening[1], fixed)


def _steps(ramp: Ramp, max_steps: int) -> StepRamp:
    return round(ramp[0] * max_steps), round(ramp[1] * max_steps)
