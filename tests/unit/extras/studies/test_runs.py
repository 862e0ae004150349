from __future__ import annotations

import math
from pathlib import Path

import pytest

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.command_line import parse_arguments
from sparseforge_ds.extras.studies.runs import (
    Run,
    at_the_edge,
    choose_rates,
    prunings,
    result_runs,
    selection_runs,
    unique,
)
from sparseforge_ds.extras.studies.settings import read_comparison
from tests.unit.extras.studies.test_settings import GOOD, write


def test_the_grid_has_every_rate_seed_and_budget(tmp_path: Path) -> None:
    config = read_comparison(write(tmp_path))
    assert [run.name for run in selection_runs(config)] == [
        "fixed-lr0.001-seed3-steps40",
        "fixed-lr0.002-seed3-steps40",
    ], "ours has one learning rate, so there is nothing to choose"
    pruned = prunings(config)
    assert [pruning.name for pruning in pruned] == ["pruned-seed3-steps0", "pruned-seed0-steps0"]
    command = pruned[0].command(config, Path("out"))
    flags = "--seq_length 256 --seed 3 --mask wanda --tokens 131072 --epochs 4 --soft 0.4 --rate 0.02"
    assert command == f"sparseforge prune {config.model} out --text {config.train_text} {flags}"
    alone = read_comparison(write(tmp_path, one_shot={"alone": {"epochs": 0}}))
    assert [pruning.seed for pruning in prunings(alone)] == [3], "no seed changes it"
    command = prunings(alone)[0].command(alone, Path("out"))
    assert "--rate" not in command and "--seed" not in command, "nothing is trained"
    # What the runs prune, models without a run prune, too.
    base = {**GOOD["base"], "sparseforge": {"importance": "magnitude", "include": ["*.mlp.*"]}}
    (some, _) = prunings(read_comparison(write(tmp_path, base=base)))
    assert some.settings(config)["block"] == pruned[0].settings(config)["block"]
    of_mlps = read_comparison(write(tmp_path, base=base))
    assert some.settings(of_mlps)["block"]["include"] == ["*.mlp.*"]
    assert some.command(of_mlps, Path("out")).endswith('--rate 0.02  # with {"include": ["*.mlp.*"]} in its block')
    chosen = choose_rates(config, {"fixed-lr0.001-seed3-steps40": 5.0, "fixed-lr0.002-seed3-steps40": 4.0})
    assert {key: run.learning_rate for key, run in chosen.items()} == {
        **{("ours", steps): 0.5 for steps in (40, 80)},
        **{("fixed", steps): 0.002 for steps in (40, 80)},
    }
    counting = result_runs(config, chosen)
    assert len(counting) == 2 * 2 * 2
    again = {run.name for run in counting} & {run.name for run in selection_runs(config)}
    assert again == {"fixed-lr0.002-seed3-steps40"}
    assert len(unique([*selection_runs(config), *counting])) == 2 + 8 - 1


def test_every_budget_has_a_rate_of_its_own_where_asked(tmp_path: Path) -> None:
    config = read_comparison(write(tmp_path, choose_at_each_budget=True))
    tried = [run.name for run in selection_runs(config)]
    assert tried == [f"fixed-lr{rate}-seed3-steps{steps}" for steps in (40, 80) for rate in (0.001, 0.002)]
    chosen = choose_rates(config, dict(zip(tried, (5.0, 4.0, 3.0, 3.5), strict=True)))
    assert [chosen["fixed", steps].learning_rate for steps in (40, 80)] == [0.002, 0.001]
    counting = [run for run in result_runs(config, chosen) if run.method.name == "fixed"]
    assert {(run.steps, run.seed, run.learning_rate) for run in counting} == {
        *[(40, seed, 0.002) for seed in (3, 0)],
        *[(80, seed, 0.001) for seed in (3, 0)],
    }
    scores = {name: math.inf if name.endswith("80") else 4.0 for name in tried}
    with pytest.raises(ValueError, match="methods.fixed: diverges at all learning rates with 80 steps"):
        choose_rates(config, scores)


def test_a_rate_at_the_edge_of_its_grid_is_marked() -> None:
    assert at_the_edge((0.001, 0.002), 0.002) and not at_the_edge((0.5,), 0.5), "one value is no grid"
    assert not at_the_edge((1e-3, 2e-3, 4e-3), 2e-3) and at_the_edge((1e-3, 2e-3, 4e-3), 1e-3)
    assert not at_the_edge((), None)
    assert not at_the_edge((0.0, 0.1, 0.2), 0.0) and at_the_edge((0.0, 0.1, 0.2), 0.2), "no decay is the least"


def test_a_decay_is_chosen_with_the_learning_rate(tmp_path: Path) -> None:
    content = {"cast": {"method": "cast", "decays": [0.1, 0.01], "learning_rates": [1e-3, 2e-3]}}
    config = read_comparison(write(tmp_path, methods={"ours": {"learning_rates": [0.5]}, **content}, reference="ours"))
    tried = selection_runs(config)
    assert [(run.learning_rate, run.decay) for run in tried] == [
        *[(1e-3, 0.01), (1e-3, 0.1)],
        *[(2e-3, 0.01), (2e-3, 0.1)],
    ]
    assert tried[1].name == "cast-lr0.001-decay0.1-seed3-steps40"
    assert tried[1].deepspeed(config)["sparseforge"]["method"] == {"name": "cast", "decay": 0.1}
    chosen = choose_rates(config, {run.name: 4.0 if run is tried[2] else 5.0 for run in tried})
    assert chosen["cast", 40] is not tried[2] and chosen["cast", 40] == tried[2]
    counting = [run for run in result_runs(config, chosen) if run.method.name == "cast"]
    assert {run.decay for run in counting} == {0.01} and tried[2] in counting
    with pytest.raises(
        ValueError, match=r"methods.ours with 40 steps: sparseforge.method.decay: method .sparseforge. does not use it"
    ):
        read_comparison(write(tmp_path, methods={"ours": {"decays": [0.1]}}, reference="ours"))


def test_a_method_that_always_diverges_is_refused(tmp_path: Path) -> None:
    config = read_comparison(write(tmp_path))
    scores = {run.name: math.inf for run in selection_runs(config)}
    with pytest.raises(ValueError, match="methods.fixed: diverges at all learning rates with 40 steps; add lower ones"):
        choose_rates(config, scores)


def test_the_command_is_the_launchers(tmp_path: Path) -> None:
    config = read_comparison(write(tmp_path, flags={"warmup": 0.1, "activation_checkpointing": True}, ranks=2))
    run = Run(config.methods["ours"], 0.25, 3, 40)
    folder = Path("out/runs") / run.name
    arguments = parse_arguments(run.arguments(config, folder))
    assert arguments.learning_rate == 0.25 and arguments.seed == 3 and arguments.warmup == 0.1
    assert arguments.teacher == "larger" and arguments.activation_checkpointing and arguments.model == "model"
    assert arguments.deepspeed == f"out/runs/{run.name}.json" and arguments.output_dir == str(folder)
    assert run.command(config, folder).startswith("deepspeed --num_gpus 2 launch/train.py --deepspeed out/runs/ours-")
    content = run.deepspeed(config)
    assert content["train_batch_size"] == 8 and content["sparseforge"]["max_steps"] == 40


def test_flags_of_every_kind_reach_the_run(tmp_path: Path) -> None:
    """null is a flag's own default, also where the file has another one for all methods."""
    (tmp_path / "eval.jsonl").write_text("")
    flags = {
        "report_to": ["wandb", "tensorboard"],
        "eval_dataset": "eval.jsonl",
        "teacher": "larger",
        "weight_decay": 0.5,
    }
    methods = {"ours": {"flags": {"teacher": None, "weight_decay": None}}}
    config = read_comparison(write(tmp_path, flags=flags, methods=methods))
    run = Run(config.methods["ours"], 1e-3, 0, 40)
    arguments = parse_arguments(run.arguments(config, tmp_path / "run"))
    assert arguments.report_to == ["wandb", "tensorboard"] and arguments.eval_dataset == str(tmp_path / "eval.jsonl")
    assert arguments.teacher is None and arguments.weight_decay == RunArguments(deepspeed="").weight_decay
