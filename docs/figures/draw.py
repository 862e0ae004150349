"""Draws the plots of the documentation as SVG, from the package, the planner and the study's results.

    python docs/figures/draw.py [FOLDER] [--only NAME ...]

schedule.svg  the annealed numbers of a default run
memory.svg    what `sparseforge plan` expects of one GPU, kind by kind, in each phase of a step
results.svg   test perplexity against steps, by method, from the rows in studies/
bits.svg      KL to the dense model against bits a weight, from studies/quantized
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from sparseforge_ds.config import SparseForgeConfig

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLANNED = "--model Qwen/Qwen3-14B --gpus 16 --deepspeed ds_configs/zero3.json --global_batch 64 --micro_batch 2"
"""The run of memory.svg: launch/qwen3_14b.sh."""
SHORT_TO_LONG = ("stories_start", "stories_start_long", "stories_short", "defaults", "defaults_long")
"""Studies of results.svg."""
_ROWS = 3000
"""Rows of the prunable weights of stories260K, which share a scale each."""
_ELEMENTS = 226_560
"""Elements of those weights."""
_COLOURS = [
    "#4c72b0",
    "#dd8452",
    "#55a868",
    "#c44e52",
    "#8172b3",
    "#937860",
    "#da8bc3",
    "#8c8c8c",
    "#ccb974",
    "#64b5cd",
]


def schedule(target: Path) -> None:
    """x, beta, lambda_mid and T over a default run of 1,000 steps."""
    config = SparseForgeConfig(max_steps=1000)
    plan = config.resolved_schedule
    steps = range(config.max_steps + 1)
    dials = [plan.dials(step) for step in steps]
    figure, axes = pyplot.subplots(figsize=(8, 3.4))
    axes.axvspan(0, plan.freeze_step, color="#dd8452", alpha=0.12)
    axes.axvspan(plan.freeze_step, config.max_steps, color="#4c72b0", alpha=0.10)
    for name, values in {
        "x: share of the soft mask that the network sees": [each.x for each in dials],
        "β: share of the hard choice in a gate": [each.beta for each in dials],
        "λ_mid: push away from the middle": [each.mid_penalty for each in dials],
        "T: temperature of the gate": [each.temperature for each in dials],
    }.items():
        axes.plot(steps, values, label=name, linewidth=1.8)
    middle = (plan.freeze_step + config.max_steps) / 2
    axes.text(plan.freeze_step / 2, 1.05, "masks move", ha="center", fontsize=8)
    axes.text(middle, 1.05, "frozen: weights are finetuned, with the teacher", ha="center", fontsize=8)
    axes.set(xlim=(0, config.max_steps), ylim=(0, 1.14), xlabel="optimizer step, of 1,000")
    axes.legend(fontsize=8, loc="center right")
    _save(figure, target)


def memory(target: Path) -> None:
    """The plan of one GPU as stacked bars: what is always there, and what each phase adds."""
    command = [sys.executable, "-m", "sparseforge_ds", "plan", *PLANNED.split(), "--activation_checkpointing", "--json"]
    planned = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)[0]
    found = planned["memory"]
    of_mask = {"dense", "mask", "curvature sums", "kept bits", "flip bits"}
    kinds = {
        "weights, gradients": ("weights", "gradients", "persistent weights", "gradient bucket"),
        "master and moments": ("master", "moments"),
        "teacher": ("teacher", "teacher's persistent weights"),
        "masks, and W beside them": tuple(of_mask),
    }
    always = {name: sum(found["resident"].get(key, 0) for key in keys) for name, keys in kinds.items()}
    bars = [
        ("before step 1:\nstart" if phase == "start" else f"masks move:\n{phase}", sum(added.values()))
        for phase, added in found["phases"].items()
    ]
    figure, axes = pyplot.subplots(figsize=(8, 3.4))
    for row, (_, added) in enumerate(bars):
        left = 0.0
        parts = {**always, "this phase's own": added, "reserve (assumed)": found["reserve"]}
        for colour, (name, size) in zip(_COLOURS, parts.items(), strict=False):
            axes.barh(row, size / 2**30, left=left, color=colour, label=name if row == 0 else None)
            left += size / 2**30
    axes.barh(len(bars), found["frozen_peak"] / 2**30, color="#b0b0b0", label="all of it, once frozen")
    axes.set_yticks(range(len(bars) + 1), [*(name for name, _ in bars), "masks frozen:\nthe peak"], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of one of 16 GPUs, planned: Qwen3-14B, ZeRO-3, 2 x 4,096 tokens a GPU")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=4)
    _save(figure, target)


def result_lines() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every line of results.svg by its label, which is the name in the first study that has it.

    Rows belong together by their settings: two studies may give one name to different settings, or two to the same.
    """
    lines: dict[str, list[dict[str, Any]]] = {}
    for study in SHORT_TO_LONG:
        for row in map(json.loads, (ROOT / "studies" / study / "results.jsonl").read_text().splitlines()):
            if row["kind"] == "result":
                lines.setdefault(json.dumps([row["settings"], row["flags"]], sort_keys=True), []).append(row)
    # A method with one budget makes no line.
    drawn = [rows for rows in lines.values() if len({row["steps"] for row in rows}) > 1]
    labelled = {rows[0]["method"]: rows for rows in drawn}
    assert len(labelled) == len(drawn), "two lines have one label"
    return labelled


def results(target: Path) -> None:
    """Draw test perplexity against the steps of a run, mean over seeds, for methods with the default loss."""
    lines: dict[str, dict[int, list[float]]] = {}
    for name, rows in result_lines().items():
        lines[name] = {}
        for row in rows:
            lines[name].setdefault(row["steps"], []).append(row["test_perplexity"])
    last = (ROOT / "studies" / SHORT_TO_LONG[-1] / "results.jsonl").read_text().splitlines()
    (dense,) = (row["test_perplexity"] for row in map(json.loads, last) if row["kind"] == "dense")
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for colour, (name, by_steps) in zip(_COLOURS, lines.items(), strict=False):
        steps = sorted(by_steps)
        means = [statistics.fmean(by_steps[count]) for count in steps]
        width = 2.2 if name in ("sparseforge", "block_start") else 1.2
        axes.plot(steps, means, marker="o", markersize=3, linewidth=width, color=colour, label=name)
    axes.axhline(dense, color="black", linewidth=1, linestyle="--", label=f"dense, {dense:.3f}")
    ticks = sorted({count for by_steps in lines.values() for count in by_steps})
    axes.set(xscale="log", yscale="log", xlabel="optimizer steps of 8 x 256 tokens", ylabel="test perplexity per token")
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_yticks([4, 5, 6, 7], ["4", "5", "6", "7"])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    _save(figure, target)


def bits(target: Path) -> None:
    """Draw the KL to the dense model against the bits that a pruned or rounded weight takes."""
    folder = ROOT / "studies" / "quantized"
    points: dict[str, dict[float, list[float]]] = {}
    for row in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
        if row["kind"] != "result":
            continue
        quantize = row["settings"].get("quantize") or {"bits": 16}
        is_sparse = row["settings"].get("pattern", "2:4") == "2:4"
        label = ("2:4" if is_sparse else "dense") + (
            ", trained, then rounded" if quantize.get("from") == 1 else ", trained"
        )
        size = _bits_of_weight(quantize["bits"], is_sparse)
        points.setdefault(label, {}).setdefault(size, []).append(row["test_kl"])
    # Rounding a dense model needs no training, so it is what every other point has to beat.
    for row in map(json.loads, (folder / "rounded.jsonl").read_text().splitlines()):
        size = _bits_of_weight(int(row["model"].removeprefix("int")), is_sparse=False)
        points.setdefault("dense, rounded", {})[size] = [row["perplexity"]["kl"]]
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for colour, (label, divergences) in zip(_COLOURS, points.items(), strict=False):
        sizes = sorted(divergences)
        means = [statistics.fmean(divergences[size]) for size in sizes]
        axes.plot(sizes, means, marker="o", markersize=4, linewidth=1.5, color=colour, label=label)
    axes.set(yscale="log", xlabel="bits a weight, scales and positions included", ylabel="KL to dense, nats a token")
    axes.legend(fontsize=8, loc="lower left")
    _save(figure, target)


def _bits_of_weight(code: int, is_sparse: bool) -> float:
    """Return the bits of a weight of stories260K: code, position, and its part of a row's scale of 16 bits."""
    scale = 16 * _ROWS / _ELEMENTS if code < 16 else 0
    return (code / 2 + 1 if is_sparse else code) + scale


FIGURES: dict[str, Callable[[Path], None]] = {
    "schedule": schedule,
    "memory": memory,
    "results": results,
    "bits": bits,
}


def _save(figure: pyplot.Figure, target: Path) -> None:
    figure.savefig(target, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def draw(folder: Path, names: list[str]) -> None:
    """Write the named figures into a folder."""
    with matplotlib.rc_context({"svg.hashsalt": "sparseforge", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for name in names:
            FIGURES[name](folder / f"{name}.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    arguments = parser.parse_args()
    draw(arguments.folder, arguments.only)
