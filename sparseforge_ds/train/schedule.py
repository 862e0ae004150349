"""The learning rate as a function of the optimizer step; nothing to save, nothing to resume."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then a cosine down to a floor.

    `step` counts optimizer steps that were applied: a step that fp16 loss scaling skips is not one of them.
    """

    peak: float
    """Highest rate, at the end of the warm-up."""
    warmup: float
    """Share of the run over which the rate rises."""
    floor: float
    """Share of the peak where the cosine ends."""
    max_steps: int
    """Optimizer steps over which the rate falls to its floor; later steps stay there."""

    def __call__(self, step: int) -> float:
        """Return the rate of the step that follows `step` applied ones; never 0 unless the floor is."""
        warmup_steps = round(self.warmup * self.max_steps)
        if step < warmup_steps:
            return self.peak * (step + 1) / (warmup_steps + 1)
        progress = min(1.0, (step - warmup_steps) / max(1, self.max_steps - 1 - warmup_steps))
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))
