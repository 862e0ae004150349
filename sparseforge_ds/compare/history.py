"""What a run's TensorBoard log says, as plain lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import HISTOGRAMS, SCALARS, EventAccumulator

CURVES = {
    "mask/undecided": "undecided",
    "mask/flip_rate": "flip_rate",
    "mask/soft_to_hard_gap": "gap",
    "loss/total": "loss",
    "loss/cross_entropy": "cross_entropy",
    "dials/x": "x",
}
"""What is kept of the scalars, and its name in a history."""
_MASKS = "mask/"


def read_history(folder: Path) -> dict[str, Any]:
    """The curves of a run as {"steps": [...], "values": [...]} by name; `mask_values` has counts for every step."""
    if not (folder / "tensorboard").is_dir():
        raise ValueError(f"{folder}: has no TensorBoard log")
    # 0: keep all points, not a sample of them.
    log = EventAccumulator(str(folder / "tensorboard"), size_guidance={SCALARS: 0, HISTOGRAMS: 0})
    log.Reload()
    tags = log.Tags()
    history: dict[str, Any] = {}
    for tag, name in CURVES.items():
        if tag in tags[SCALARS]:
            events = log.Scalars(tag)
            history[name] = {"steps": [e.step for e in events], "values": [e.value for e in events]}
    counts: dict[int, list[float]] = {}
    for tag in tags[HISTOGRAMS]:
        for event in log.Histograms(tag) if tag.startswith(_MASKS) else ():
            bucket = list(event.histogram_value.bucket)
            before = counts.get(event.step, [0.0] * len(bucket))
            counts[event.step] = [a + b for a, b in zip(before, bucket, strict=True)]
    if counts:
        history["mask_values"] = {"steps": sorted(counts), "values": [counts[step] for step in sorted(counts)]}
    return history
