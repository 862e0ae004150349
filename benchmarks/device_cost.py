"""Cost of a step on a GPU, counted without one: kernels, bytes, memory, collectives and waits of every phase.

    python benchmarks/device_cost.py                                          # Qwen3-14B on 16 ranks of ZeRO-3
    python benchmarks/device_cost.py --model deepseek-ai/deepseek-moe-16b-base
    python benchmarks/device_cost.py --layers 4 --places 8                    # quicker; where the bytes are moved

The package's own code runs at real sizes on fake CUDA tensors, which have shapes and no values, under a process group
that moves nothing. A model's weights are whole on the fake device; masters and states are laid out as ZeRO would on one
of the ranks. The result is the same on every machine that has g++, and needs no GPU.

What it sees: every operation that reaches the device, the bytes that its operands have, tensors that are alive, the
payload of collectives, values that the host waits for, copies between devices. What it does not see: streams and what
overlaps on them, values (a branch on one takes the way of ones), which kernels a device has and how good they are,
what DeepSpeed does around the optimizer's step, and caches: every operand counts as read from memory. An operation
counts as one kernel, a compiled function as those that the compiler makes of it on a CPU; sorts and large sums take a
few. These are counts, and times that are calculated from them.
Nothing was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from benchmarks.fake_cuda import shim

if __name__ == "__main__":
    shim.load()

from benchmarks.device_cost_phases import Setting, costs
from benchmarks.fake_cuda.counting import Cost
from benchmarks.fake_cuda.engine import Rank
from sparseforge_ds.config import shipped


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub_group = json.loads((shipped.FOLDER / "zero3.json").read_text())["zero_optimization"]["sub_group_size"]
    parser.add_argument("--model", default="Qwen/Qwen3-14B", help="a config.json, or a hub id that is known offline")
    parser.add_argument("--layers", type=int, help="of the model, instead of all")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument(
        "--sub_group_size", type=float, default=sub_group, help=f"of ZeRO-3 (default: {sub_group}, as shipped)"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the micro-batch")
    parser.add_argument("--source", default="training", choices=("training", "probe"), help="curvature.source")
    parser.add_argument("--optimizer", default="fused", choices=("fused", "foreach"), help="kernels of torch's AdamW")
    parser.add_argument("--bandwidth", type=float, default=2.7, help="of the device's memory, TB/s")
    parser.add_argument("--launch", type=float, default=5.0, help="of one kernel, microseconds")
    parser.add_argument("--places", type=int, default=0, help="functions to name that move the most bytes")
    parser.add_argument("--json", type=Path, help="write all counts to a file")
    flags = parser.parse_args()
    setting = Setting(
        flags.model,
        Rank(flags.ranks, flags.ranks // 2, flags.stage, int(flags.sub_group_size), only_prunable=True),
        flags.tokens,
        flags.source,
        flags.layers,
        flags.optimizer == "fused",
    )
    weights, matrices, phases = costs(setting)
    print(
        f"{flags.model}: {weights / 1e6:.0f}M weights of {matrices} matrices under a mask on rank {flags.ranks // 2} "
        f"of {flags.ranks}, ZeRO-{flags.stage}\ntimes are calculated: {flags.bandwidth:g} TB/s, {flags.launch:g} us a "
        "kernel; the larger one is the roofline\n"
    )
    print(table(phases, weights, flags.bandwidth * 1e12, flags.launch * 1e-6))
    if flags.places:
        for name, cost in phases.items():
            print(f"\n{name}: bytes a weight, kernels, function")
            for where, count in cost.places.most_common(flags.places):
                print(f"  {count / weights:9.2f} {cost.kernels_at[where]:9,d}  {where}")
    if flags.json is not None:
        content = {
            "setting": {**vars(flags), "json": None},
            "weights": weights,
            "matrices": matrices,
            "phases": {name: vars(cost) for name, cost in phases.items()},
        }
        flags.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


HEAD: tuple[str, ...] = (
    *("phase", "kernels", "read GB", "written GB", "B/weight", "memory ms", "launch ms", "peak GB", "held B/w"),
    *("collectives MB", "host waits", "uploads", "host copies MB"),
)


def table(phases: dict[str, Cost], weights: int, bandwidth: float, launch: float) -> str:
    """Format a line for each phase, then the kinds of collectives, and the code lines where the host waits."""
    rows = [HEAD]
    for name, cost in phases.items():
        moved = cost.read + cost.written
        cells: list[Any] = [name, f"{cost.kernels:,}", f"{cost.read / 1e9:.2f}", f"{cost.written / 1e9:.2f}"]
        cells += [f"{moved / weights:.1f}", f"{moved / bandwidth * 1e3:.1f}", f"{cost.kernels * launch * 1e3:.1f}"]
        cells += [f"{cost.peak / 1e9:.2f}", f"{cost.held / weights:.2f}"]
        cells += [f"{sum(cost.collectives.values()) / 1e6:.1f}", sum(cost.syncs.values()), sum(cost.uploads.values())]
        cells.append(f"{sum(cost.copied.values()) / 1e6:.1f}")
        rows.append(tuple(str(cell) for cell in cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    for name, cost in phases.items():
        kinds = [f"{kind} {cost.calls[kind]} x, {size / 1e6:.1f} MB" for kind, size in cost.collectives.items()]
        waits = [f"{count} x {where}" for where, count in cost.syncs.most_common()]
        uploads = [f"{count} x {where} (upload)" for where, count in cost.uploads.most_common()]
        if told := kinds + waits + uploads + cost.faults:
            lines.append(f"\n{name}:\n  " + "\n  ".join(told))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # autograd's thread of a device that is not there may abort the process when it is joined
