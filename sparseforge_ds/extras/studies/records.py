"""Records of the runs of a comparison, written atomically, and the rows of `results.jsonl` made of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.disk import atomic_file, measurements_text
from sparseforge_ds.extras.studies.runs import Run, at_the_edge, prunings, result_runs, selection_runs, unique
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.extras.studies.task_columns import task_columns

_OUTCOMES = ("diverged", "sparsity", "seconds", "resumed", "start", "path")
"""Keys of a record that a row repeats, besides the measurements."""
_SINCE = ("hardware", "task_rows")
"""Settings that records of earlier versions lack; these are continued as they were then, on any hardware."""
_PATHS = ("model", "teacher", "teacher_logits", "dataset", "text", "eval_dataset")
"""Keys of settings that may name files and folders."""


class Records:
    """Folder `OUT/records`, with a file for the settings and the outcome of each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, name: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a run, and begin one if there is none.

        Args:
            name: the run.
            wanted: settings that it depends on, as JSON.

        Raises:
            ValueError: the run was started with other settings.
        """
        record = self.compare(name, wanted)
        if record is None:
            wanted = json.loads(json.dumps(wanted))
            record = {"wanted": wanted, "resolved": _resolved(wanted)}
            self.write(name, record)
        return record

    def compare(self, name: str, wanted: dict[str, Any]) -> dict[str, Any] | None:
        """Return the record of a run, or None if there is none, as `open` does without writing."""
        record = self.read(name)
        if record is None:
            return None
        wanted = json.loads(json.dumps(wanted))
        resolved = _resolved(wanted)
        before = record["wanted"]
        unknown = [key for key in _SINCE if key not in before]
        wanted = {key: value for key, value in wanted.items() if key not in unknown}
        resolved = {key: value for key, value in resolved.items() if key not in unknown}
        if before != wanted and record.get("resolved") != resolved:
            differing = [
                _describe(key, before.get(key), wanted.get(key))
                for key in sorted(set(before) | set(wanted))
                if before.get(key) != wanted.get(key)
            ]
            raise ValueError(
                f"{self.folder.parent}: the run {name} was started with other settings ({', '.join(differing)}); give "
                "another --out, or remove this folder. Methods, seeds, budgets and learning rates may be added to a "
                "comparison, but settings of its runs may not change"
            )
        return record

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the record of a run, or None if there is none."""
        path = self.folder / f"{name}.json"
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); remove it to repeat the run") from None
        return dict(content)

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Write the record of a run."""
        write_text(self.folder / f"{name}.json", measurements_text(record, indent=1) + "\n")


def _describe(key: str, before: Any, now: Any) -> str:
    """Return the name of a setting that differs; for the hardware, what it was and is, which CONFIG does not say."""
    if key != "hardware":
        return key
    words = [" on ".join(hardware.values()) for hardware in (before, now)]
    return f"hardware: {words[0]}, and here {words[1]}; continue on hardware like the first"


def _resolved(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which files and folders are called by absolute paths, wherever CONFIG was read."""
    names = {key: wanted[key] for key in _PATHS if wanted.get(key) is not None}
    return {**wanted, **{key: _absolute(value) for key, value in names.items()}}


def _absolute(value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(name) for name in value]
    prefix = "stream:" if str(value).startswith("stream:") else ""
    path = str(value).removeprefix(prefix)
    return f"{prefix}{os.path.abspath(path)}" if os.path.exists(path) else value


def settled(record: Mapping[str, Any]) -> bool:
    """Return True if a run is trained and measured, or has diverged."""
    return "validation_perplexity" in record or "diverged" in record


def write_rows(
    out: Path, config: CompareConfig, baselines: dict[str, Any], records: Records, chosen: Mapping[tuple[str, int], Run]
) -> list[dict[str, Any]]:
    """Write and return `results.jsonl`: rows for the dense model, magnitude pruning, and every settled run."""
    # The baselines.
    rows: list[dict[str, Any]] = []
    row: dict[str, Any]
    texts = ("validation", "test", *config.other_texts)
    figures = list(task_columns(config.tasks))
    measured = [*(f"{text}_{figure}" for text in texts for figure in ("perplexity", "kl")), *figures]
    for kind, name, baseline in (("dense", "dense", "dense"), ("one_shot", "one-shot magnitude", "magnitude")):
        row = {"kind": kind, "method": name, "run": None, "seed": None, "steps": 0, "tokens": 0}
        row |= {"learning_rate": None, "decides": False, "chosen": False}
        row |= {f"{text}_perplexity": baselines[f"{baseline}_{text}"] for text in texts}
        # Studies of earlier releases have measured no KL.
        row |= {f"{text}_kl": 0.0 if baseline == "dense" else baselines.get(f"magnitude_{text}_kl") for text in texts}
        row |= {figure: baselines.get(f"{baseline}_{figure}") for figure in figures}
        row["diverged"] = baselines.get(f"{baseline}_diverged")
        numbers = [row[f"{text}_perplexity"] for text in texts]
        if row["diverged"] is None and not all(number is not None and math.isfinite(number) for number in numbers):
            row["diverged"] = "a loss is not finite"  # records of earlier versions do not say of which text
        rows.append({**row, "seconds": None, "command": None})
    # The models that were pruned without a run.
    for pruning in prunings(config):
        record = records.read(pruning.name) or {}
        if settled(record):
            row = {"kind": "one_shot", "method": pruning.method.name, "run": pruning.name, "seed": pruning.seed}
            row |= {"steps": 0, "tokens": 0, "learning_rate": None, "decides": False, "chosen": False}
            row |= {key: record.get(key) for key in (*measured, *_OUTCOMES)} | _all_tokens(0, record)
            row |= _hardware_of(record)
            settings = {key: value for key, value in asdict(pruning.method).items() if key != "name"}
            rows.append(
                {**row, "settings": settings, "command": pruning.command(config, out / "models" / pruning.name)}
            )
    # The runs that are done so far.
    deciding = selection_runs(config)
    counting = result_runs(config, chosen) if chosen else []
    for run in unique([*deciding, *counting]):
        record = records.read(run.name) or {}
        if not settled(record):
            continue
        tokens = run.steps * config.batch * config.seq_length
        row = {
            "kind": "result" if run in counting else "tried",
            "method": run.method.name,
            "run": run.name,
            "seed": run.seed,
            "steps": run.steps,
            "tokens": tokens,
            "learning_rate": run.learning_rate,
            "decay": run.decay,
            "decides": run in deciding,
            "chosen": bool(chosen) and replace(chosen[run.method.name, run.steps], seed=run.seed) == run,
            "at_the_edge": at_the_edge(run.method.learning_rates, run.learning_rate),
            "decay_at_the_edge": at_the_edge(run.method.decays, run.decay),
            **{key: record.get(key) for key in (*measured, *_OUTCOMES)},
            **_all_tokens(tokens, record),
            **_hardware_of(record),
            "settings": run.method.block,
            "flags": run.method.flags,
            "command": run.command(config, out / "runs" / run.name),
        }
        rows.append(row)
    write_text(out / "results.jsonl", "".join(measurements_text(row) + "\n" for row in rows))
    return rows


def _hardware_of(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the dtype and the kind of device that a run computed in; None if its record does not say it."""
    hardware = record.get("wanted", {}).get("hardware", {})
    return {key: hardware.get(key) for key in ("dtype", "device")}


def _all_tokens(tokens: int, record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the tokens of a run and of all epochs of its start, and these by pruned weight.

    They are None if the start, or the number of weights, was not recorded.
    """
    block_start = record.get("start")
    if block_start is None:
        return {"all_tokens": None, "tokens_a_weight": None}
    count = tokens + block_start["tokens"] * block_start["epochs"]
    elements = (record.get("sparsity") or {}).get("elements")
    return {"all_tokens": count, "tokens_a_weight": count / elements if elements else None}


def write_text(path: Path, content: str) -> None:
    """Write a file atomically."""
    with atomic_file(path) as file:
        file.write(content.encode())
