"""The script for a day with a GPU runs on a CPU with small sizes, so that it works when there is one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_part_that_is_not_there_is_refused_before_any_begins(tmp_path: Path, device: str) -> None:
    """A part of a GPU alone is none on a CPU."""
    command = [
        "bash",
        "benchmarks/gpu_day.sh",
        str(tmp_path / "out"),
        "fused",
        "linera" if device == "cuda" else "linear",
    ]
    environment = {**os.environ, "GPU_DAY_DEVICE": device}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 2 and not (tmp_path / "out").exists()
    assert run.stderr.startswith(f"gpu_day: {command[-1]}: no such part on {device}; use some of: ")


def test_the_script_has_its_parts_and_the_readme_names_them() -> None:
    script = (ROOT / "benchmarks" / "gpu_day.sh").read_text()
    on_gpu, on_cpu = (set(names.split()) for names in re.findall(r'parts="([\w ]+)"', script))
    cpu_half, gpu_half = script.split("\nelse\n")
    assert set(re.findall(r"^    part (\w+)", cpu_half, re.MULTILINE)) == on_cpu
    assert set(re.findall(r"^    part (\w+)", gpu_half, re.MULTILINE)) == on_gpu
    table = (ROOT / "benchmarks" / "README.md").read_text().partition("\n# A day with a GPU\n")[2]
    rows = re.findall(r"^\| ([\w, ]+) \|", table, re.MULTILINE)
    assert {name for row in rows for name in row.split(", ")} - {"part"} == on_gpu
