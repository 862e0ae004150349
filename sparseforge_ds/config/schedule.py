"""From fractions of a run to optimizer steps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sparseforge_ds.config.parts import Window
from sparseforge_ds.config.rules import REPORT_EVERY
from sparseforge_ds.config.strict import require
from sparseforge_ds.mask.anneal import Schedule

UPDATES = 15
"""Mask updates until the freeze, unless `schedule.update_every` says otherwise: rates count updates, so that as many of
them make the same masks of a run of any length."""

if TYPE_CHECKING:
    from sparseforge_ds.config.block import SparseForgeConfig


def schedule_of(config: SparseForgeConfig) -> Schedule:
    """The schedule in optimizer steps: every fraction times `max_steps`, rounded; masks are frozen at step 2 at the
    earliest, so that short runs do what long ones do."""

    def steps(window: Window) -> tuple[int, int]:
        return round(window[0] * config.max_steps), round(window[1] * config.max_steps)

    part = config.schedule
    if config.method != "sparseforge":
        every, frozen = REPORT_EVERY, 1.0
        if config.refresh is not None:
            every, frozen = -(-REPORT_EVERY // config.refresh.every) * config.refresh.every, config.refresh.frozen
        elif config.sampling is not None:
            frozen = config.sampling.frozen
        part = dataclasses.replace(part, update_every=every, hardening=(1 - frozen, 1 - frozen))
    start, stop = steps(part.hardening)
    if part.hardening[1] > 0:  # A window that a short run rounds away still has room for one update.
        stop = min(max(stop, 2 if config.method == "sparseforge" else 1), config.max_steps)
    hardening = min(start, stop), stop
    return Schedule(
        update_every=max(1, hardening[1] // UPDATES) if part.update_every is None else part.update_every,
        temperature=part.temperature,
        temperature_min=part.temperature_min,
        temperature_decay=part.temperature_decay,
        blend=steps(part.blend),
        mid_penalty=part.mid_penalty,
        mid_penalty_ramp=steps(part.mid_penalty_ramp),
        penalty_rate=part.penalty_rate,
        mask_rate=part.mask_rate,
        hardening=hardening,
        hard=part.hard,
    )


def check_length(config: SparseForgeConfig, schedule: Schedule) -> None:
    """Whether masks move before they are frozen: else the run would be one of another method, unsaid."""
    if config.method == "sparseforge" and schedule.freeze_step:
        key, every, needed = "schedule.update_every", schedule.update_every, schedule.update_every + 1
        end, fixed = config.schedule.hardening[1], "or use hardening [0, 0] for a fixed mask"
    elif config.refresh is not None and config.max_steps:
        key, every, needed = "refresh.every", config.refresh.every, config.refresh.every
        end, fixed = 1 - config.refresh.frozen, 'or use "method": "naive_retrain" for a fixed mask'
    else:
        return
    cure = f"use at least {_fewest_steps(end, needed)} steps, {fixed}"
    when = f"masks are frozen at step {schedule.freeze_step} of {config.max_steps}, before their first update"
    if every == 1:
        require(schedule.freeze_step >= needed, "max_steps", config.max_steps, f"{when}; {cure}")
    require(schedule.freeze_step >= needed, key, every, f"{when}; lower it, {cure}")


def _fewest_steps(end: float, needed: int) -> int:
    """The shortest run in which a window that ends at the fraction `end` ends at step `needed` or later."""
    if needed <= 2:
        return needed
    steps = max(needed, int((needed - 1) / end))
    while round(end * steps) < needed:
        steps += 1
    return steps
