"""Base of the methods' settings, and checks of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sparseforge_ds.config.strict import require
from sparseforge_ds.mask.anneal import MaskSchedule

if TYPE_CHECKING:  # it imports torch, for which the help of a command need not wait
    from sparseforge_ds.mask.pattern import Pattern

Ramp = tuple[float, float]
"""Start and stop of a dial's move, in fractions of a run."""
REPORT_EVERY = 10
"""Steps between two measurements of masks that move in every step, since a measurement waits for the device."""


OPTIONAL = ("importance", "curvature", "start", "distillation", "low_rank")
"""Keys of the block that not every method uses."""


@dataclass(frozen=True)
class MethodConfig:
    """Settings of a method, the object under the key `method`."""

    name: str
    """Name of the rule that forms the mask."""
    starts_from: ClassVar[dict[str, Any]] = {"importance": "magnitude"}
    """Keys of the block that the method starts from, as published. A preset and given keys override them."""
    reads: ClassVar[tuple[str, ...]] = ("distillation", "low_rank")
    """Those of `OPTIONAL` that have an effect on a run of the method; any other is refused where it is set."""

    def schedule(self, max_steps: int) -> MaskSchedule:
        """Return the steps at which masks move and freeze. Here they are frozen before the first step."""
        return MaskSchedule(REPORT_EVERY, 0)

    def check_length(self, max_steps: int) -> None:
        """Raise ValueError if masks would freeze before their first move."""

    def state_keys(self, pattern: Pattern) -> tuple[str, ...]:
        """Return the names of the method's own optimizer states, each one fp32 number per element while masks move."""
        return ()

    def dense_until(self, max_steps: int) -> int:
        """Return the number of optimizer steps after which the network sees m W; it sees dense weights before."""
        return 0


def require_key(part: MethodConfig, key: str, condition: bool, cure: str) -> None:
    """Raise ValueError about a key of a method unless `condition` holds."""
    require(condition, f"method.{key}", getattr(part, key), cure)


def require_ramp(part: MethodConfig, key: str) -> None:
    """Raise ValueError unless a ramp is two ordered fractions of a run."""
    start, stop = getattr(part, key)
    require_key(part, key, 0 <= start <= stop <= 1, "use fractions 0 <= start <= stop <= 1")


def require_updates(
    max_steps: int, schedule: MaskSchedule, key: str, every: int, needed: int, end: float, fixed: str
) -> None:
    """Raise ValueError if masks freeze before step `needed`, that of their first update.

    Args:
        max_steps: optimizer steps of the run.
        schedule: the schedule that `max_steps` gives.
        key: key of the method that sets the steps between updates.
        every: its value.
        needed: first step at which masks may freeze.
        end: fraction of the run at which masks freeze.
        fixed: the setting for a fixed mask, for the message.
    """
    if schedule.freeze_step >= needed:
        return
    # The message names the shortest run that would do, with the rounding of schedules.
    fewest = needed if needed <= 2 else max(needed, int((needed - 1) / end))
    while needed > 2 and round(end * fewest) < needed:
        fewest += 1
    when = f"masks are frozen at step {schedule.freeze_step} of {max_steps}, before their first update"
    cure = f"use at least {fewest} steps, {fixed}"
    if every == 1:
        require(False, "max_steps", max_steps, f"{when}; {cure}")
    require(False, f"method.{key}", every, f"{when}; lower it, {cure}")
