#!/usr/bin/env python3
"""Cost of a forge in a training step: time, memory and messages against the same DeepSpeed run without it.

deepspeed --num_gpus 2 benchmarks/step_cost.py
deepspeed --num_gpus 2 benchmarks/step_cost.py --stage 1 --dtype bf16 --json step_cost.json

Both runs live in one process group with the same model, data and seed, and take turns in blocks of T_update steps, so
that noise of the machine meets both. A block has exactly one mask update. The exit code is 0 whatever the numbers are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from benchmarks.phases import PHASES, STATE_KEYS, Messages, Phases, held_bytes
from benchmarks.variants import PHASE_HARDENING, Batch, StepText, Variant, build, forge_config, memory
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.train.launcher import unlink_shared_buffers

GOAL_RATIO = 1.04
GOAL_BYTES = 6.5


class Block(NamedTuple):
    """T_update steps of one run on this rank."""

    steps: list[float]
    """Seconds of each."""
    processor: float
    """Seconds of processor time in all of them: waiting for other ranks and other programs not included."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description="Step time, memory and messages of SparseForge against plain DeepSpeed"
    )
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="ZeRO stage")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--micro_batch", type=int, default=1, help="sequences of a micro-batch and rank")
    parser.add_argument("--vocabulary", type=int, default=2048, help="vocabulary of the random model")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of an optimizer step")
    parser.add_argument("--update_every", type=int, default=10, help="T_update: optimizer steps between mask updates")
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each run, in blocks of T_update")
    parser.add_argument("--pattern", default="2:4", help="n:m or block<size>")
    parser.add_argument("--importance", default="fisher", choices=("hutchinson", "fisher", "wanda", "magnitude"))
    parser.add_argument("--source", choices=("training", "probe"), help="curvature.source (default: the default)")
    parser.add_argument(
        "--phase",
        default="hardening",
        choices=tuple(PHASE_HARDENING),
        help="part of the schedule that is measured; hardening costs most",
    )
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--teacher", action="store_true", help="distil from a random teacher in the run with the forge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # given by the launcher
    arguments = parser.parse_args(argv)
    for name in ("hidden", "layers", "seq", "micro_batch", "vocabulary", "accumulation", "update_every", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: use an integer >= 1")
    if arguments.hidden % 64:
        parser.error(f"--hidden {arguments.hidden}: use a multiple of 64, one attention head")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Measure, print on rank 0, and write the JSON file when asked to."""
    arguments = parse_arguments(argv)
    deepspeed.init_distributed()
    unlink_shared_buffers()
    device = get_accelerator().current_device_name()
    phases = Phases()
    phases.wrap_hooks()
    blocks = max(2, -(-arguments.steps // arguments.update_every))
    on_cpu = get_accelerator().device_name() == "cpu"
    rounds = ("plain", "forge") if on_cpu else ("plain", "forge", "split")
    # An accelerator compiles in the second update too, as the first has no masks to compare with.
    warm_up = 1 if on_cpu else 2
    # On an accelerator the split has blocks of its own. After the count of messages one is left, in which masks freeze.
    config = forge_config(arguments, (blocks * (len(rounds) - 1) + warm_up + 2) * arguments.update_every)
    data = random_batches(arguments, device)
    load = os.getloadavg()[0]

    start_libraries(arguments, config, phases, data)
    growth: dict[str, int | None] = {}
    variants: dict[str, Variant] = {}
    for name in ("plain", "forge"):
        base = memory()
        variants[name] = build(arguments, config, phases, with_forge=name == "forge")
        if (forge := variants[name].forge) is not None:
            forge.start(StepText(variants["forge"].engine, data) if forge.needs_probe else None)
        for _ in range(warm_up):
            run_block(variants[name], data, arguments)
        growth[name] = memory(base)
    variants["split"] = variants["forge"]

    measured: dict[str, list[Block]] = {name: [] for name in rounds}
    split: list[dict[str, float]] = []
    for _ in range(blocks):
        for name in rounds:
            phases.synchronize = name == "split"
            phases.take()
            measured[name].append(run_block(variants[name], data, arguments))
            if name == rounds[-1]:
                split.append(phases.take())
    phases.synchronize = False
    messages = count_messages(variants["forge"], data, arguments, phases)
    result = {
        "settings": {
            **{key: value for key, value in vars(arguments).items() if key not in ("json", "local_rank")},
            "world_size": dist.get_world_size(),
            "device": device if on_cpu else torch.cuda.get_device_name(),
            "blocks": blocks,
            "load_before": load,
            "load_after": os.getloadavg()[0],
        },
        **times(measured, split, arguments.update_every),
        **sizes(variants["forge"], growth),
        "collective_bytes_per_update": dict(messages.bytes),
        "collective_calls_per_update": dict(messages.calls),
    }
    result["goals"] = goals(result)
    if dist.get_rank() == 0:
        print(report(result), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def random_batches(arguments: argparse.Namespace, device: str) -> list[Batch]:
    """Return the micro-batches of one step on this rank; every step of both runs uses them."""
    generator = torch.Generator().manual_seed(arguments.seed + dist.get_rank())
    shape = (arguments.accumulation, arguments.micro_batch, arguments.seq)
    tokens = torch.randint(1, arguments.vocabulary, shape, generator=generator).to(device)
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def start_libraries(
    arguments: argparse.Namespace, config: SparseForgeConfig, phases: Phases, data: list[Batch]
) -> None:
    """Do one step of a small engine, so that the first variant does not pay for one-time loading."""
    small = argparse.Namespace(**{**vars(arguments), "hidden": 64, "layers": 1})
    build(small, config, phases, with_forge=False).step(data)


def run_block(variant: Variant, data: list[Batch], arguments: argparse.Namespace) -> Block:
    """T_update steps, the last of which updates the masks. Collective."""
    accelerator = get_accelerator()
    accelerator.synchronize()
    dist.barrier()
    processor = time.process_time()
    marks = [time.perf_counter()]
    for _ in range(arguments.update_every):
        variant.step(data)
        accelerator.synchronize()
        marks.append(time.perf_counter())
    steps = [stop - start for start, stop in zip(marks, marks[1:], strict=False)]
    return Block(steps, time.process_time() - processor)


def count_messages(variant: Variant, data: list[Batch], arguments: argparse.Namespace, phases: Phases) -> Messages:
    """Collectives of `forge.step` in one block of steps: those of one mask update."""
    messages = Messages(phases)
    forge = variant.forge
    assert forge is not None
    original = forge.step

    def counted(*args: Any, **kwargs: Any) -> bool:
        with messages:
            return original(*args, **kwargs)

    forge.step = counted  # type: ignore[method-assign]
    run_block(variant, data, arguments)
    return messages


def times(measured: dict[str, list[Block]], split: list[dict[str, float]], every: int) -> dict[str, Any]:
    """Step times and their ratio, and the split of what was added; everything of rank 0.

    A step's time is the mean over its block, so that it has its share of the update. `of_medians` puts the share
    together from the medians of the steps with and without an update: less moved by single disturbances.
    """
    plain, forge = measured["plain"], measured["forge"]
    pairs = [sum(b.steps) / sum(a.steps) for a, b in zip(plain, forge, strict=True)]
    low, _, high = quantiles(pairs, n=4, method="inclusive")  # two blocks have no quartiles outside them
    plain_median = median([step for block in plain for step in block.steps])
    without = median([step for block in forge for step in (block.steps[:-1] or block.steps)])
    update = median([block.steps[-1] for block in forge])
    return {
        "step_s": {
            "plain": median([sum(block.steps) for block in plain]) / every,
            "forge": median([sum(block.steps) for block in forge]) / every,
            "forge_without_update": without,
            "forge_with_update": update,
        },
        "ratio": {
            "median": median(pairs),
            "quartiles": [low, high],
            "blocks": pairs,
            "of_medians": ((every - 1) * without + update) / every / plain_median,
            "processor_time": median([b.processor / a.processor for a, b in zip(plain, forge, strict=True)]),
        },
        "split_s_per_step": {name: median([block.get(name, 0.0) for block in split]) / every for name in PHASES},
    }


def sizes(variant: Variant, growth: dict[str, int | None]) -> dict[str, Any]:
    """Bytes per prunable weight on the rank that holds most. Collective."""
    forge = variant.forge
    assert forge is not None
    plain_peak, forge_peak = growth["plain"], growth["forge"]
    peak = None if plain_peak is None or forge_peak is None else forge_peak - plain_peak
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (held_bytes(forge), peak))
    stored = max((stored for stored, _ in everyone), key=lambda stored: sum(stored.values()))
    masked = forge.coverage.masked
    return {
        "weights": {"masked": masked, "all": forge.coverage.total},
        "extra_bytes_per_weight_and_rank": {
            **{key: value / masked for key, value in stored.items()},
            "total": sum(stored.values()) / masked,
            "total_times_ranks": sum(stored.values()) / masked * dist.get_world_size(),
        },
        "extra_peak_memory_per_weight_and_rank": None if peak is None else max(extra for _, extra in everyone) / masked,
    }


def goals(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return goals, results, and if each goal is met; null if the settings are not the goal's."""
    settings = result["settings"]
    ratio, stored = result["ratio"]["median"], result["extra_bytes_per_weight_and_rank"]["total_times_ranks"]
    of_goal = settings["update_every"] == 10 and settings["accumulation"] == 4 and not settings["teacher"]
    return {
        "step_time_ratio": {"goal": GOAL_RATIO, "value": ratio, "met": ratio <= GOAL_RATIO if of_goal else None},
        "extra_bytes_times_ranks": {"goal": GOAL_BYTES, "value": stored, "met": round(stored, 2) <= GOAL_BYTES},
    }


def report(result: dict[str, Any]) -> str:
    """Format the numbers as text."""
    settings, step, ratio = result["settings"], result["step_s"], result["ratio"]
    stored, weights = result["extra_bytes_per_weight_and_rank"], result["weights"]
    lines = [
        f"{settings['world_size']} ranks on {settings['device']}, ZeRO-{settings['stage']} {settings['dtype']}, "
        f"{weights['all'] / 1e6:.1f}M weights ({weights['masked'] / 1e6:.1f}M masked), {settings['phase']}, "
        f"{settings['importance']}, T_update {settings['update_every']}, accumulation {settings['accumulation']}, "
        f"{settings['micro_batch']} x {settings['seq']} tokens, {settings['blocks']} blocks, "
        f"load {settings['load_before']:.1f} to {settings['load_after']:.1f}",
        "",
        f"step, plain DeepSpeed          {step['plain'] * 1e3:10.1f} ms",
        f"step, with the forge           {step['forge'] * 1e3:10.1f} ms   "
        f"({step['forge_without_update'] * 1e3:.1f} without an update, {step['forge_with_update'] * 1e3:.1f} with one)",
        f"ratio of neighbouring blocks   {ratio['median']:10.3f}      quartiles {ratio['quartiles'][0]:.3f} to "
        f"{ratio['quartiles'][1]:.3f}; of medians {ratio['of_medians']:.3f}",
        f"ratio of processor time        {ratio['processor_time']:10.3f}",
        "",
        "of each step with the forge, the update spread over T_update:",
    ]
    for name, seconds in result["split_s_per_step"].items():
        if seconds:
            lines.append(f"  {name:<28} {seconds * 1e3:10.2f} ms   {seconds / step['plain']:6.1%} of a plain step")
    lines += ["", "extra bytes per masked weight on a rank, by what exists:"]
    lines += [f"  {key:<28} {stored[key]:10.3f}" for key in (*STATE_KEYS, "cached", "total", "total_times_ranks")]
    if (peak := result["extra_peak_memory_per_weight_and_rank"]) is not None:
        lines.append(f"  {'peak memory, difference':<28} {peak:10.3f}")
    lines += ["", "collectives of a mask update, payload on a rank:"]
    for name, total in sorted(result["collective_bytes_per_update"].items()):
        lines.append(f"  {name:<28} {total:10d} bytes in {result['collective_calls_per_update'][name]} calls")
    lines.append("")
    for name, goal in result["goals"].items():
        verdict = {True: "met", False: "MISSED", None: "not judged: other settings than the goal's"}[goal["met"]]
        lines.append(f"goal {name} <= {goal['goal']:.2f}: {goal['value']:.3f}, {verdict}")
    if ratio["quartiles"][0] <= GOAL_RATIO <= ratio["quartiles"][1]:
        lines.append(
            "the blocks differ by more than the distance to the goal: repeat on an idle machine, or with more --steps"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
