#!/usr/bin/env python3
"""The table that ends the demo: how far from dense, what is proved, and where it lies.

    python launch/demo_table.py RUN RESULT REPORTS SECONDS

REPORTS has what the tools wrote with --json: dense.json, one_shot.json and sparse.json (perplexity), verify.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sparseforge_ds.model.coverage import percent

Row = tuple[str, str, str]


def rows(run: Path, result: Path, reports: Path, seconds: float) -> list[Row]:
    """Return (heading, label, value) of every line; an empty heading continues the one above."""
    dense, one_shot, sparse = (
        float(_read(reports / f"{name}.json")["perplexity"]["perplexity"]) for name in ("dense", "one_shot", "sparse")
    )
    verify = _read(reports / "verify.json")
    description = _read(run / "sparseforge.json")
    batch = int(_read(run / "ds_config.json")["train_batch_size"])
    steps, length = description["config"]["max_steps"], description["run"]["seq_length"]
    coverage = description["coverage"]
    pattern = description["config"]["pattern"]
    with_gap = [f"{pruned:.3f}   ({pruned / dense - 1:.1%} above dense)" for pruned in (one_shot, sparse)]
    return [
        ("held-out perplexity", "dense", f"{dense:.3f}"),
        ("", f"one-shot magnitude {pattern}", with_gap[0]),
        ("", f"SparseForge {pattern}", with_gap[1]),
        ("under a mask", "of the linear weights", percent(coverage["masked"], coverage["linear"])),
        ("", "of all parameters", percent(coverage["masked"], coverage["total"])),
        (f"{pattern} groups", "checked", f"{verify['groups']:,}"),
        ("", "violations", f"{verify['violations']:,}"),
        ("training", "tokens", f"{steps * batch * length:,}   ({steps} steps of {batch} x {length})"),
        ("", "time", f"{int(seconds) // 60} min {int(seconds) % 60} s"),
        ("result", "model", f"{result}   (AutoModelForCausalLM.from_pretrained loads it)"),
        ("", "TensorBoard log", f"{run / 'tensorboard'}"),
        ("", "to look at it", f".venv/bin/tensorboard --logdir {run / 'tensorboard'}"),
    ]


def table(lines: list[Row]) -> str:
    """Format the rows as aligned text, with a rule above every heading."""
    first, second = (max(len(line[column]) for line in lines) for column in (0, 1))
    rule = "-" * max(first + second + 4 + len(line[2]) for line in lines)
    text = []
    for heading, label, value in lines:
        if heading:
            text.append(rule)
        text.append(f"{heading:<{first}}  {label:<{second}}  {value}")
    return "\n".join([*text, rule])


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


if __name__ == "__main__":
    print(table(rows(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))))
