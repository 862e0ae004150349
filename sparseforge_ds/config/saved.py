"""What a saved `sparseforge` block leaves out: keys that its release did not have, as that release behaved."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sparseforge_ds.config.parts import ScheduleConfig


def completed(block: dict[str, Any]) -> dict[str, Any]:
    """A saved block with the method that its run had, where today's default is another one.

    A release saves all keys that it has. What is missing was therefore not there, and the run did as is filled in here:
    without `schedule.straight_through`, W moved by the optimizer's whole step; without `curvature.factored`, scores
    were made of single elements, and `hutchinson` probed weights whatever `per_token` said; without `low_rank.shift`, B
    started from what the mask removed.

    Args:
        block: parsed JSON, as `SparseForgeConfig.to_dict` of this or an earlier release gave it; stays as it is.
    """
    schedule, curvature, importance = block.get("schedule", {}), block.get("curvature", {}), block.get("importance")
    if not isinstance(schedule, dict) or not isinstance(curvature, dict):
        return block  # damaged: whoever builds from it says where
    low_rank = block.get("low_rank")
    if isinstance(low_rank, dict) and "shift" not in low_rank:
        block = {**block, "low_rank": {**low_rank, "shift": False}}
    whole_steps = "straight_through" not in schedule
    if "factored" not in curvature:
        curvature = {**curvature, "factored": False}
        if importance == "hutchinson":
            curvature["per_token"] = False
    elif whole_steps and importance != "hutchinson" and curvature["factored"] is None:
        curvature = {**curvature, "factored": False}  # null came to mean "as per_token" together with straight_through
    if block.get("method", "sparseforge") != "sparseforge":
        schedule = asdict(ScheduleConfig())  # unused, and only accepted as the default of the day
    elif whole_steps:
        schedule = {**schedule, "straight_through": True}
    return {**block, "schedule": schedule, "curvature": curvature}
