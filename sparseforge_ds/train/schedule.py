"""The learning rate as a function of the optimizer step; nothing to save, nothing to resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import get_scheduler

_FLOOR_OF = {
    "cosine_with_min_lr": ("min_lr_rate", "min_lr"),
    "cosine_warmup_with_min_lr": ("min_lr_rate", "min_lr"),
    "warmup_stable_decay": ("min_lr_ratio",),
}
"""Settings of transformers' schedulers that say where the rate ends; the first is a share of the peak."""


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up and then a cosine down to a floor, or one of transformers' schedules.

    `step` counts optimizer steps that were applied: a step that fp16 loss scaling skips is not one of them.
    """

    peak: float
    """Highest rate, at the end of the warm-up."""
    warmup: float
    """Share of the run over which the rate rises."""
    floor: float
    """Share of the peak where the rate ends, in schedules that have a floor."""
    max_steps: int
    """Optimizer steps over which the rate falls to its floor; later steps stay there."""
    kind: str = "cosine"
    """`--lr_scheduler_type`; "cosine" is ours, which does not begin at 0."""
    settings: str | None = None
    """`--lr_scheduler_kwargs`, a JSON object."""

    def __call__(self, step: int) -> float:
        """Return the rate of the step that follows `step` applied ones."""
        if self.kind != "cosine":
            return self.peak * self._factor(min(step, max(0, self.max_steps - 1)))
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.max_steps - 1 - self.warmup_steps))
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    def __str__(self) -> str:
        """Describe the schedule for the banner."""
        warmup = "" if self.kind == "constant" else f" after {self.warmup_steps} warm-up steps"
        if self.kind == "cosine":
            return f"{self.peak:g}{warmup}, cosine to {self.peak * self.floor:g}"
        settings = f" {self.settings}" if self.settings else ""
        return f"{self.peak:g}{warmup}, {self.kind}{settings} of transformers to {self(self.max_steps):g}"

    @property
    def end(self) -> float:
        """Return the rate at which the schedule ends; 0 for one like `linear`, of which the last step has a little."""
        return self.peak * (self.floor if self.kind == "cosine" else self._factor(self.max_steps))

    @property
    def warmup_steps(self) -> int:
        """Return the number of steps over which the rate rises."""
        return round(self.warmup * self.max_steps)

    def check(self) -> None:
        """Check that transformers makes such a schedule, and that its rates lie between 0 and the peak.

        Raises:
            ValueError: names the flags, and the cure.
        """
        if self.kind == "cosine" or not self.max_steps:
            return
        flags = f"--lr_scheduler_type {self.kind}" + (
            f" --lr_scheduler_kwargs {self.settings}" if self.settings else ""
        )
        # Let transformers make the rates of a few steps, so that settings it refuses are named now.
        steps = {0, self.warmup_steps, *(self.max_steps * quarter // 4 for quarter in range(1, 4)), self.max_steps - 1}
        try:
            factors = {step: self._factor(step) for step in sorted(steps)}
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            example = (
                """, like --lr_scheduler_kwargs '{"num_decay_steps": 200}'"""
                if self.kind == "warmup_stable_decay"
                else ""
            )
            raise ValueError(f"{flags}: transformers says {error}; correct its settings{example}") from None
        # All phases must fit into the run, and every rate between 0 and the peak.
        decay = self._settings.get("num_decay_steps", 0)
        if decay < 0:
            raise ValueError(f"{flags}: num_decay_steps is {decay}; use an integer >= 0")
        if self.warmup_steps + decay > self.max_steps:
            raise ValueError(
                f"{flags}: {self.warmup_steps} steps of warm-up and {decay} of decay are more than the run's "
                f"{self.max_steps}; lower num_decay_steps or --warmup"
            )
        for step, factor in factors.items():
            if not 0 <= factor <= 1:
                raise ValueError(
                    f"{flags}: the rate of step {step + 1} is {factor:g} of the peak; settings must keep it within "
                    "0 and 1"
                )

    @property
    def _settings(self) -> dict[str, Any]:
        """Return the settings of transformers' schedule, with the floor where it has one."""
        settings: dict[str, Any] = json.loads(self.settings or "{}")
        names = _FLOOR_OF.get(self.kind, ())
        return settings if not names or settings.keys() & set(names) else {**settings, names[0]: self.floor}

    def _factor(self, step: int) -> float:
        """Return the share of the peak at a step of transformers' schedule."""
        schedule = _schedule(self.kind, self.peak, self.warmup_steps, self.max_steps, json.dumps(self._settings))
        return float(schedule(step))


@lru_cache
def _schedule(kind: str, peak: float, warmup_steps: int, steps: int, settings: str) -> Callable[[int], float]:
    """Return transformers' schedule, a pure function of the step, as its scheduler keeps no other state."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = get_scheduler(kind, optimizer, warmup_steps, steps, json.loads(settings))
    schedule: Callable[[int], float] = scheduler.lr_lambdas[0]
    return schedule
