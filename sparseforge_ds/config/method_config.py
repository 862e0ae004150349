"""What all methods have, and what their keys have to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sparseforge_ds.config.strict import require
from sparseforge_ds.mask.anneal import MaskSchedule

Window = tuple[float, float]
REPORT_EVERY = 10
"""Steps between two looks at masks that move in every step: a look waits for the device."""


@dataclass(frozen=True)
class MethodConfig:
    """What all methods have."""

    name: str
    """Which rule forms the mask."""
    starts_from: ClassVar[dict[str, Any]] = {}
    """The block around the method, as published where it was; a preset and given keys override it."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Keys of the block that the method does not use: objects, and switches."""

    def schedule(self, max_steps: int) -> MaskSchedule:
        """When masks move and freeze: here never, and before the first step."""
        return MaskSchedule(REPORT_EVERY, 0)

    def check_length(self, max_steps: int) -> None:
        """Raise a ValueError where masks would be frozen before they move: the mask would be fixed all the time."""


def require_key(part: MethodConfig, key: str, condition: bool, cure: str) -> None:
    """Raise a ValueError about a key of a method where a condition does not hold."""
    require(condition, f"method.{key}", getattr(part, key), cure)


def require_window(part: MethodConfig, key: str) -> None:
    """Raise a ValueError where a window is no part of a run."""
    start, stop = getattr(part, key)
    require_key(part, key, 0 <= start <= stop <= 1, "use fractions 0 <= start <= stop <= 1")


def require_updates(
    max_steps: int, schedule: MaskSchedule, key: str, every: int, needed: int, end: float, fixed: str
) -> None:
    """Raise where a window that ends at the fraction `end` ends before step `needed`."""
    if schedule.freeze_step >= needed:
        return
    fewest = needed if needed <= 2 else max(needed, int((needed - 1) / end))
    while needed > 2 and round(end * fewest) < needed:
        fewest += 1
    when = f"masks are frozen at step {schedule.freeze_step} of {max_steps}, before their first update"
    cure = f"use at least {fewest} steps, {fixed}"
    if every == 1:
        require(False, "max_steps", max_steps, f"{when}; {cure}")
    require(False, f"method.{key}", every, f"{when}; lower it, {cure}")
