"""What a comparison has found by now: a row for every run, in results.jsonl, and all that is made of the rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparseforge_ds.compare.assessment import Baselines
from sparseforge_ds.compare.figures import draw
from sparseforge_ds.compare.page import page
from sparseforge_ds.compare.records import Records, write_text
from sparseforge_ds.compare.runs import Run, at_the_edge, one_shot_runs, result_runs, selection_runs, unique
from sparseforge_ds.compare.settings import CompareConfig
from sparseforge_ds.compare.summary import summarize
from sparseforge_ds.compare.table import legend_lines, markdown, results_table, selection_table

Chosen = Mapping[tuple[str, int], float]
"""The learning rate of every method at every budget; empty before they are chosen."""
_FOUND = ("validation_perplexity", "test_perplexity", "diverged", "sparsity", "seconds", "resumed", "agreement")
"""What a row takes from a record."""


def write_rows(
    out: Path, config: CompareConfig, baselines: Baselines, records: Records, chosen: Chosen
) -> list[dict[str, Any]]:
    """Write `results.jsonl`, with a row for the dense model, for magnitude pruning, and for every run that is done."""
    values = asdict(baselines)
    rows = []
    for kind, name, which in (("dense", "dense", "dense"), ("one_shot", "one-shot magnitude", "magnitude")):
        row = {"kind": kind, "method": name, "run": None, "seed": None, "steps": 0, "tokens": 0}
        row |= {"learning_rate": None, "decides": False, "chosen": False}
        row |= {key: values[f"{which}_{key.partition('_')[0]}"] for key in _FOUND[:2]}
        rows.append({**row, "seconds": None, "command": None})
    deciding, untrained = selection_runs(config), one_shot_runs(config)
    counting = result_runs(config, chosen) if chosen else []
    for run in unique([*deciding, *untrained, *counting]):
        record = records.read(run.name) or {}
        if settled(record):
            kind = "one_shot" if not run.trained else "result" if run in counting else "tried"
            rows.append(_row(out, config, run, record, kind, run in deciding, chosen))
    write_text(out / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def settled(record: Mapping[str, Any]) -> bool:
    """Whether a run is trained and measured, or known to diverge."""
    return "validation_perplexity" in record or "diverged" in record


def _row(
    out: Path, config: CompareConfig, run: Run, record: Mapping[str, Any], kind: str, decides: bool, chosen: Chosen
) -> dict[str, Any]:
    return {
        "kind": kind,
        "method": run.method.name,
        "run": run.name,
        "seed": run.seed,
        "steps": run.steps,
        "tokens": run.steps * config.batch * config.seq_length if run.trained else 0,
        "learning_rate": run.learning_rate if run.trained else None,
        "decides": decides,
        "chosen": chosen.get((run.method.name, run.steps)) == run.learning_rate,
        "at_the_edge": run.trained and at_the_edge(run.method, run.learning_rate),
        **{key: record.get(key) for key in _FOUND},
        "settings": run.method.block,
        "flags": run.method.flags,
        "command": run.command(config, out / "runs" / run.name),
    }


def write_pages(out: Path, config: CompareConfig, rows: list[dict[str, Any]], notes: list[str], pattern: str) -> str:
    """Write `table.md`, the figures and `index.html`, and return the first."""
    lines = summarize(rows, config.compared_with)
    table = markdown(lines, rows, config, notes)
    write_text(out / "table.md", table)
    stored = ((row["run"], out / "histories" / f"{row['run']}.json") for row in rows if row["kind"] == "result")
    histories = {name: json.loads(path.read_text()) for name, path in stored if path.exists()}
    figures = draw(lines, rows, histories, out / "figures")
    tables = [each for each in (results_table(lines, config), selection_table(rows, config)) if each is not None]
    words = [*legend_lines(lines, config), *notes]
    title = f"Comparison on {Path(config.model).name}, {pattern}"
    commands = [row["command"] for row in rows if row["command"]]
    text = (out / "config.json").read_text()
    write_text(out / "index.html", page(title, tables, words, figures, text, commands))
    return table
