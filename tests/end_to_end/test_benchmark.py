"""benchmarks/step_cost.py by its arguments, at a size that only shows that every number is there."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.phases import PHASES
from benchmarks.step_cost import main, parse_arguments
from benchmarks.variants import deepspeed_config
from tests.distributed import ROOT, run_distributed

TINY = ["--hidden=64", "--layers=1", "--seq=8", "--vocabulary=64", "--accumulation=2", "--update_every=2", "--steps=4"]


def measure(file: Path, *arguments: str) -> str:
    """Return what this rank printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*TINY, *arguments, "--json", str(file)]) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Measure a run on two ranks with a teacher, which takes every path; return what it printed and what it wrote."""
    file = tmp_path_factory.mktemp("cost") / "cost.json"
    printed, nothing = run_distributed(measure, 2, file, "--teacher")
    assert not nothing
    return printed, json.loads(file.read_text())


def test_every_number_is_there(cost: tuple[str, dict[str, Any]]) -> None:
    _, result = cost
    assert result["settings"]["world_size"] == 2 and result["settings"]["blocks"] == 2
    assert set(result["step_s"]) == {"plain", "forge", "forge_without_update", "forge_with_update"}
    assert set(result["ratio"]) == {"median", "quartiles", "blocks", "of_medians", "processor_time"}
    assert len(result["ratio"]["blocks"]) == 2
    # Quartiles of two blocks lie between them.
    low, high = result["ratio"]["quartiles"]
    blocks = result["ratio"]["blocks"]
    assert min(blocks) < low < result["ratio"]["median"] < high < max(blocks)
    assert set(result["split_s_per_step"]) == {"publication", "curvature", "gate", "push", "teacher", "distillation"}
    assert min(result["split_s_per_step"].values()) > 0
    assert set(result["goals"]) == {"step_time_ratio", "extra_bytes_times_ranks"}
    assert result["goals"]["step_time_ratio"]["met"] is None  # T_update and accumulation are not the goal's


def test_bytes_are_those_of_the_tensors(cost: tuple[str, dict[str, Any]]) -> None:
    _, result = cost
    bytes_per_weight = result["extra_bytes_per_weight_and_rank"]
    for key, size in {"dense": 4, "mask": 2}.items():
        assert bytes_per_weight[key] == pytest.approx(size / 2, rel=1e-3)  # on two ranks
    assert (
        bytes_per_weight["curvature"] == 0 < bytes_per_weight["cached"] < 0.2
    )  # flip and kept bits, and row and column sums
    assert result["extra_peak_memory_per_weight_and_rank"] is None  # on a CPU
    assert bytes_per_weight["total_times_ranks"] == pytest.approx(2 * (3.0 + bytes_per_weight["cached"]))


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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_runs_have_the_partitions_and_buckets_that_are_shipped(stage: int) -> None:
    zero = deepspeed_config(parse_arguments(["--stage", str(stage)]), 2)["zero_optimization"]
    assert zero["stage"] == stage and "auto" not in zero.values()
    if stage:
        shipped = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())["zero_optimization"]
        assert zero.keys() == shipped.keys()
        assert all(zero[key] == value for key, value in shipped.items() if value != "auto")


def test_the_readme_names_every_phase() -> None:
    rows = re.findall(r"^\| ([\w, ]+) \|", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE)
    assert set(PHASES) <= {name for row in rows for name in row.split(", ")}
