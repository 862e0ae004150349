"""The numbers of a rehearsal, put together and as text."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from sparseforge_ds.mask.anneal import Schedule

GIB = 2**30


def phases(step_seconds: list[float], schedule: Schedule) -> dict[str, dict[str, float | int]]:
    """Median seconds of a step in each phase, apart with and without a mask update."""
    kinds: dict[str, list[float]] = {}
    for step, seconds in enumerate(step_seconds, 1):
        start, stop = schedule.hardening
        phase = "heating" if step <= start else "hardening" if step <= stop else "finetuning"
        if schedule.is_update(step):
            phase += ", mask update"
        elif schedule.is_projection(step):
            phase += ", projection"
        kinds.setdefault(phase, []).append(seconds)
    return {phase: {"steps": len(stored), "seconds": median(stored)} for phase, stored in kinds.items()}


def report(result: dict[str, Any]) -> str:
    """Format the numbers as text."""
    lines: list[str] = []
    settings = result["settings"]
    reduced = [f"{key} {settings[key]}" for key in ("experts", "shrink") if settings[key] not in (None, 1)]
    say: Callable[[str], None] = lines.append
    say(
        f"{result['model']}{''.join(f', {text}' for text in reduced)}: {result['ranks']} ranks on {result['device']}, "
        f"ZeRO-{result['stage']}, bf16, {settings['micro_batch']} x {settings['seq_length']} tokens a rank, vocabulary "
        f"{settings['vocabulary']}"
    )
    for run in result["runs"]:
        memory = run["memory"]
        say("")
        say(f"{run['layers']} layers, {run['parameters']:,} parameters, {run['masked']:,} under a mask")
        for phase, numbers in run["phases"].items():
            say(f"  {phase:<26} {numbers['seconds']:9.2f} s a step, median of {numbers['steps']}")
        say(f"  {'load, first step':<26} {run['start']['seconds']:9.1f} s")
        say(f"  {'save':<26} {run['save']['seconds']:9.1f} s, {run['save']['bytes'] / GIB:.2f} GiB")
        for name in ("consolidate", "verify"):
            text = f"{run[name]['seconds']:9.1f} s, peak {run[name]['peak'] / GIB:.2f} GiB resident"
            say(f"  {name:<26} {text}{', proof included' if name == 'consolidate' else ''}")
        say(
            f"  {'memory of a rank':<26} {memory['found'] / GIB:9.2f} GiB above the {memory['before'] / GIB:.2f} of "
            f"imports; planned {memory['planned'] / GIB:.2f} ({memory['worst']}): {memory['ratio']:.2f} of it"
        )
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory["own_by_moment"].items())
        say(f"  {'its own, by moment, GiB':<26} {parts}; peak resident {memory['peak_resident'] / GIB:.2f}")
        say(f"  {'all ranks together':<26} {memory['all_ranks'] / GIB:9.2f} GiB")
    full = result["full_depth"]
    say("")
    say(
        f"full depth: {full['layers']} layers, {full['parameters']:,} parameters, {full['gpus']} GPUs, same batch: "
        f"planned {full['planned'] / GIB:.1f} GiB on each ({full['worst']}), "
        f"checkpoint {full['checkpoint'] / GIB:.0f} GiB"
    )
    experts = "" if settings["experts"] is None else f" of {settings['experts']} experts"
    for phase, seconds in full["seconds"].items():
        item = full["seconds_per_layer"][phase]
        say(f"  {phase:<26} {seconds:9.2f} s a step on these {result['ranks']} ranks: {item:.2f} a layer{experts}")
    if not full["seconds"]:
        say("  one depth gives no time of a layer; give two to --layers")
    if result["device"] == "cpu":
        say("  times of CPU ranks say nothing about a GPU; memory and shapes do")
    return "\n".join(lines)
