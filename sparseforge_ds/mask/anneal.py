"""Annealing as pure functions of the optimizer step (SparseForge, arXiv 2605.06402, section 3; eqs. 5, 7-11).

Nothing here remembers a phase: `Schedule.dials(step)` gives the same numbers whenever and wherever it is asked, so a
resumed run, a re-sharded run and an unbroken run cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

StepRamp = tuple[int, int]


@dataclass(frozen=True)
class Dials:
    """The annealed numbers at one step."""

    temperature: float
    """T of the soft gate (eq. 5)."""
    beta: float
    """Share of the hard target in the blended gate (eq. 7)."""
    mid_penalty: float
    """lambda_mid (eq. 8)."""
    penalty_rate: float
    """eta (eq. 8)."""
    mask_rate: float
    """alpha (eq. 9); 0 once frozen."""
    x: float
    """Share of the soft mask in the effective mask (eq. 10): 1 before hardening starts, 0 once frozen."""


@dataclass(frozen=True)
class MaskSchedule:
    """Steps of the optimizer at which the masks of a method move and freeze."""

    update_every: int
    freeze_step: int
    """Step at whose end masks are frozen; 0 means that they are fixed before training starts."""

    def is_update(self, step: int) -> bool:
        """Return True if masks are updated, or reported, after optimizer step `step` (the first step is 1)."""
        return 0 < step < self.freeze_step and step % self.update_every == 0

    def is_projection(self, step: int) -> bool:
        """Return True if masks are frozen after optimizer step `step` (0: before the first)."""
        return step == self.freeze_step

    def phases(self, max_steps: int) -> list[tuple[str, int, int]]:
        """Return (name, first step, last step) of the phases of a run: for people, never for control flow."""
        return [("moving", 0, self.freeze_step), ("frozen", self.freeze_step, max_steps)]

    def phase(self, step: int) -> str:
        """Return the name of the phase that optimizer step `step` ends in."""
        return next(name for name, start, _ in reversed(self.phases(step)) if step >= start)


@dataclass(frozen=True)
class Schedule(MaskSchedule):
    """Schedule of a soft mask, with every annealed number."""

    temperature: float
    temperature_min: float
    temperature_decay: float | None
    blend: StepRamp
    mid_penalty: float
    mid_penalty_ramp: StepRamp
    penalty_rate: float
    mask_rate: float
    hardening_start: int
    hard: bool = False

    @property
    def hardening(self) -> StepRamp:
        """Ramp of hardening, at whose end masks are projected."""
        return self.hardening_start, self.freeze_step

    @override
    def phases(self, max_steps: int) -> list[tuple[str, int, int]]:
        start, stop = self.hardening
        return [("heating", 0, start), ("hardening", start, stop), ("frozen", stop, max_steps)]

    @property
    def decay(self) -> float:
        """Factor gamma of T per mask update; by default the one that reaches the floor when hardening ends."""
        if self.temperature_decay is not None:
            return self.temperature_decay
        updates = max(1, self.freeze_step // self.update_every)
        return float((self.temperature_min / self.temperature) ** (1.0 / updates))

    def dials(self, step: int) -> Dials:
        """Return the annealed numbers after `step` optimizer steps."""
        frozen = step >= self.freeze_step
        x = 1.0 - progress(step, self.hardening)
        u = progress(step, self.blend)
        return Dials(
            temperature=max(self.temperature_min, self.temperature * self.decay ** (step // self.update_every)),
            beta=3 * u**2 - 2 * u**3,
            mid_penalty=self.mid_penalty * progress(step, self.mid_penalty_ramp),
            penalty_rate=self.penalty_rate,
            mask_rate=0.0 if frozen else self.mask_rate,
            x=0.0 if self.hard else x,
        )


def progress(step: int, ramp: StepRamp) -> float:
    """Return how far `step` is through a ramp, linearly: 0 up to its start, 1 from its stop on."""
    start, stop = ramp
    if step >= stop:
        return 1.0
    return 0.0 if step <= start else (step - start) / (stop - start)
