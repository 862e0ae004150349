"""benchmarks/step_cost.py by its command line, at a size that only shows that every number is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import PATIENCE, ROOT, free_port

TINY = ["--hidden=64", "--layers=1", "--seq=8", "--vocabulary=64", "--accumulation=2", "--update_every=2", "--steps=4"]


def measure(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run the command on two ranks of this machine's processors; (what it printed, what it wrote)."""
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [str(launcher), "--num_gpus", "2", "--master_port", str(free_port()), "benchmarks/step_cost.py"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{launcher.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*command, *TINY, *arguments, "--json", str(folder / "cost.json")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, json.loads((folder / "cost.json").read_text())


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """One run with a teacher, which takes every path."""
    return measure(tmp_path_factory.mktemp("cost"), "--teacher")


def test_every_number_is_there(cost: tuple[str, dict[str, Any]]) -> None:
    _, result = cost
    assert result["settings"]["world_size"] == 2 and result["settings"]["blocks"] == 2
    assert set(result["step_s"]) == {"plain", "forge", "forge_without_update", "forge_with_update"}
    assert set(result["ratio"]) == {"median", "quartiles", "blocks", "of_medians", "processor_time"}
    assert len(result["ratio"]["blocks"]) == 2
    assert set(result["split_s_per_step"]) == {"publication", "curvature", "gate", "push", "teacher", "distillation"}
    assert min(result["split_s_per_step"].values()) > 0
    assert set(result["goals"]) == {"step_time_ratio", "extra_bytes_times_ranks"}
    assert result["goals"]["step_time_ratio"]["met"] is None  # T_update and accumulation are not the goal's


def test_bytes_are_those_of_the_tensors(cost: tuple[str, dict[str, Any]]) -> None:
    _, result = cost
    held = result["extra_bytes_per_weight_and_rank"]
    for key, size in {"dense": 4, "mask": 2}.items():
        assert held[key] == pytest.approx(size / 2, rel=1e-3)  # on two ranks
    assert held["curvature"] == 0 < held["cached"] < 0.2  # flip and kept bits, and row and column sums
    assert result["extra_peak_memory_per_weight_and_rank"] is None  # on a CPU
    assert held["total_times_ranks"] == pytest.approx(2 * (3.0 + held["cached"]))


def test_a_mask_update_sends_statistics_only(cost: tuple[str, dict[str, Any]]) -> None:
    _, result = cost
    sent = result["collective_bytes_per_update"]
    assert set(sent) == {"curvature", "gate", "push"}
    # No mask and no score travels, only sums of rows and columns; tests/zero/test_communication.py counts exactly.
    assert sent["gate"] < result["weights"]["masked"] / 4


def test_report_says_which_goals_are_met(cost: tuple[str, dict[str, Any]]) -> None:
    text, _ = cost
    assert "goal step_time_ratio <= 1.04" in text
    assert "goal extra_bytes_times_ranks <= 6.50" in text
