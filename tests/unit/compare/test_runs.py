from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from sparseforge_ds.compare.runs import (
    at_the_edge,
    choose_rates,
    one_shot_runs,
    result_runs,
    selection_runs,
    unique,
)
from sparseforge_ds.compare.settings import read_config
from sparseforge_ds.config.command_line import parse_arguments
from tests.unit.compare.test_settings import write


def test_the_grid(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert [run.name for run in selection_runs(config)] == [
        "fixed-lr0.001-seed3-steps40",
        "fixed-lr0.002-seed3-steps40",
    ], "ours has one learning rate, so there is nothing to choose"
    assert [run.name for run in one_shot_runs(config)] == ["pruned-seed3-steps1", "pruned-seed0-steps1"]
    chosen = choose_rates(config, {"fixed-lr0.001-seed3-steps40": 5.0, "fixed-lr0.002-seed3-steps40": 4.0})
    assert chosen == {"ours": 0.5, "fixed": 0.002}
    counting = result_runs(config, chosen)
    assert len(counting) == 2 * 2 * 2
    again = {run.name for run in counting} & {run.name for run in selection_runs(config)}
    assert again == {"fixed-lr0.002-seed3-steps40"}
    assert len(unique([*selection_runs(config), *counting])) == 2 + 8 - 1


def test_a_rate_at_the_edge_of_the_grid(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert at_the_edge(config.methods["fixed"], 0.002)
    assert not at_the_edge(config.methods["ours"], 0.5), "not a grid"
    three = replace(config.methods["fixed"], learning_rates=(1e-3, 2e-3, 4e-3))
    assert not at_the_edge(three, 2e-3) and at_the_edge(three, 1e-3)


def test_a_method_that_always_diverges(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    found = {run.name: math.inf for run in selection_runs(config)}
    with pytest.raises(ValueError, match="methods.fixed: diverges at all learning rates; add lower ones"):
        choose_rates(config, found)


def test_the_command_is_the_launchers(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, flags={"warmup": 0.1, "activation_checkpointing": True}, ranks=2))
    run = next(run for run in result_runs(config, dict.fromkeys(config.methods, 0.25)))
    folder = Path("out/runs") / run.name
    arguments = parse_arguments(run.arguments(config, folder))
    assert arguments.learning_rate == 0.25 and arguments.seed == 3 and arguments.warmup == 0.1
    assert arguments.teacher == "larger" and arguments.activation_checkpointing and arguments.model == "model"
    assert arguments.deepspeed == f"out/runs/{run.name}.json" and arguments.output_dir == str(folder)
    assert run.command(config, folder).startswith("deepspeed --num_gpus 2 launch/train.py --deepspeed out/runs/ours-")
    content = run.deepspeed(config)
    assert content["train_batch_size"] == 8 and content["sparseforge"]["max_steps"] == 40
