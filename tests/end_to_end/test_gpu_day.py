"""The script for a day with a GPU runs on a CPU with small sizes, so that it works when there is one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from sparseforge_ds.train.launcher import free_port
from tests.distributed import PATIENCE, ROOT


def test_every_part_is_timed_and_a_failing_one_costs_itself_alone(tmp_path: Path) -> None:
    # A port that is no number makes the launcher of the second part fail.
    environment = {**os.environ, "GPU_DAY_DEVICE": "cpu", "GPU_DAY_PORT": "none"}
    command = ["bash", "benchmarks/gpu_day.sh", str(tmp_path), "cost", "fused"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    codes = dict(line.split("\t")[::2] for line in (tmp_path / "parts.tsv").read_text().splitlines()[1:])
    assert codes["fused"] == "0" and codes["cost"] != "0"
    names = {row["name"] for row in json.loads((tmp_path / "fused.json").read_text())}
    assert {"64x64 moments", "64x64 move", "64x64 soft step", "loss, gradient"} <= names


def test_a_step_is_measured_beside_plain_deepspeed(tmp_path: Path) -> None:
    environment = {**os.environ, "GPU_DAY_DEVICE": "cpu", "GPU_DAY_PORT": str(free_port())}
    command = ["bash", "benchmarks/gpu_day.sh", str(tmp_path), "cost"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (tmp_path / "parts.tsv").read_text().splitlines()[1].endswith("\t0"), run.stdout
    assert json.loads((tmp_path / "cost.json").read_text())
