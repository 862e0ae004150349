"""`sparseforge compare` on a tiny model: killed in the middle, started again, and every part of what it writes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparseforge_ds.cli.main import main
from tests.distributed import PATIENCE, ROOT
from tests.tiny_folders import deepspeed_json, write_json, write_model, write_text
from tests.unit.extras.studies.test_figures import distinct_colours

STEPS = 24
TOO_MUCH = 1e30
"""A learning rate at which every loss is NaN."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    # A study with all kinds of rows: one-shot, a rate that diverges, two seeds, a dense control.
    content = {
        "model": str(write_model(folder / "model")),
        "train_text": str(write_text(folder / "train.jsonl", 200)),
        "validation_text": {"path": str(write_text(folder / "heldout.jsonl", 220)), "documents": [200, 208]},
        "test_text": {"path": str(folder / "heldout.jsonl"), "documents": [208, 220]},
        "base": {key: value for key, value in deepspeed_json(stage=1).items() if key != "sparseforge"},
        "seq_length": 32,
        "batch": 4,
        "other_texts": {"more": {"path": str(folder / "heldout.jsonl"), "documents": [0, 12]}},
        "choose_by": "kl",
        "one_shot": {"pruned": {"mask": "magnitude", "epochs": 0, "tokens": 512}},
        "learning_rates": [3e-3, TOO_MUCH],
        "seeds": [0, 1],
        "budgets": [STEPS],
        "threads": 1,
        "points": 8,
        "flags": {"log_every": 1},
        "methods": {
            "soft": {"method": {"update_every": 1, "hardening": [0, 0.5]}},
            "fixed": {
                "method": "naive_retrain",
                "pattern": "1:4",
                "low_rank": {"k": 4, "shift": False},
                "learning_rates": [3e-3],
            },
            "control": {
                "method": "naive_retrain",
                "importance": "magnitude",
                "pattern": "4:4",
                "learning_rates": [3e-3],
            },
        },
    }
    return write_json(folder / "config.json", content)


def command(config: Path, out: Path, workers: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "sparseforge_ds",
        "compare",
        str(config),
        "--out",
        str(out),
        "--workers",
        str(workers),
    ]


def records(out: Path) -> dict[str, dict[str, Any]]:
    """Return the record of every run."""
    return {path.stem: json.loads(path.read_text()) for path in (out / "records").glob("*-seed*.json")}


def kill_in_the_middle(config: Path, out: Path) -> tuple[str, str]:
    """Start it, and kill -9 it when one run is done and the next is at work; the names of both."""
    process = subprocess.Popen(command(config, out, 1), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, process.stdout.read().decode() if process.stdout else ""
        known = records(out) if out.exists() else {}
        done = [name for name, record in known.items() if "validation_perplexity" in record]
        for log in (out / "runs").glob("*.log"):
            name = log.name.removesuffix(".log")
            at_work = done and name not in done and "lr0.003" in name
            if at_work and re.search(rb"^step [3-9]/", log.read_bytes(), re.MULTILINE):
                os.kill(process.pid, signal.SIGKILL)
                process.communicate()
                return done[0], name
        time.sleep(0.01)
    raise AssertionError("it took too long")


def test_a_comparison_that_was_killed_goes_on_without_repeating_a_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    finished, unfinished = kill_in_the_middle(config, out)
    log_time = (out / "runs" / f"{finished}.log").stat().st_mtime_ns
    before = json.loads((out / "records" / f"{finished}.json").read_text())

    # The same command again: finished runs are kept, the unfinished one goes on.
    process = subprocess.run(command(config, out, 2), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stderr
    after = json.loads((out / "records" / f"{finished}.json").read_text())
    assert (out / "runs" / f"{finished}.log").stat().st_mtime_ns == log_time, "a finished run is not made again"
    assert after["validation_perplexity"] == before["validation_perplexity"]
    assert records(out)[unfinished]["resumed"], "an unfinished one goes on"
    log = (out / "runs" / f"{unfinished}.log").read_text()
    assert "stopped by SIGTERM" in log, "it saved and stopped when the comparison was gone"

    # Rows, table, figures and page are those of a study that nobody killed.
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    check_rows(rows)
    check_order(out)
    table = (out / "table.md").read_text()
    assert table.strip() in process.stdout
    assert re.search(
        r"^\| soft \| 0.5625 \| 0.5 \| 3,072 \| 0 \| [\d.]+ \| [\d.]+ \| 0.003 \(edge\) \| 2 \|", table, re.M
    )
    assert "| training | start | steps of control |" in table
    assert "diverged" in table, "the learning rate that was too high is shown"
    assert "| KL test | KL more |" in table and "| control | 1 | 1 |" in table, "a dense control costs what dense costs"
    for name in ("perplexity", "bytes"):
        assert distinct_colours(out / "figures" / f"{name}.png") > 20, f"{name} is blank"
    assert (out / "index.html").read_text().count("data:image/png;base64,") == 2
    assert not list((out / "runs").glob("*/checkpoints")), "they are large, and of no use any more"
    # The models of results are kept, and no other.
    exported = {row["run"] for row in rows if row["kind"] in ("result", "one_shot")} - {None}
    assert {path.name for path in (out / "models").iterdir()} == exported

    # The same command on another text is refused.
    write_text(config.with_name("train.jsonl"), 201)  # under the name that the study has
    assert main(command(config, out, 2)[3:]) == 2
    assert "was started with other settings (dataset_files)" in capsys.readouterr().err


def check_rows(rows: list[dict[str, Any]]) -> None:
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("dense", "one_shot", "result", "tried")}
    assert {kind: len(of_kind) for kind, of_kind in kinds.items()} == {
        "dense": 1,
        "one_shot": 2,
        "result": 6,
        "tried": 1,
    }
    baseline, pruned = kinds["one_shot"]
    assert pruned["command"].startswith("sparseforge prune ") and pruned["start"]["tokens"] == 512
    assert pruned["test_perplexity"] == pytest.approx(baseline["test_perplexity"]), "two ways to one mask"
    for row in kinds["result"]:
        assert row["learning_rate"] == 3e-3 and row["tokens"] == STEPS * 4 * 32
        zeros = {"soft": 0.5, "fixed": 0.75, "control": 0.0}[row["method"]]
        assert row["sparsity"]["zeros"] == pytest.approx(zeros)
        assert all(row[f"{text}_kl"] > 0 for text in ("validation", "test", "more"))
        assert math.isfinite(row["test_perplexity"]) and math.isfinite(row["validation_perplexity"])
        assert row["start"]["tokens"] == 0 and row["all_tokens"] == row["tokens"] and row["path"] > 0
        assert row["command"].startswith("deepspeed --num_gpus 1 launch/train.py --deepspeed ")
    for row in kinds["tried"]:
        assert row["learning_rate"] == TOO_MUCH and "loss" in row["diverged"]
        assert row["test_perplexity"] is None, "the test text has no part in the choice"


def check_order(out: Path) -> None:
    """Check that the first step of a fixed mask sees the same tokens at a seed, and others at another seed."""
    first = {}
    for seed in (0, 1):
        log = EventAccumulator(str(out / "runs" / f"fixed-lr0.003-seed{seed}-steps{STEPS}" / "tensorboard"))
        log.Reload()
        events = log.Scalars("loss/cross_entropy")
        assert [event.step for event in events] == list(range(1, STEPS + 1))
        first[seed] = events[0].value
    assert first[0] != first[1]
