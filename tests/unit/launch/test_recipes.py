"""Every recipe, dry: bash gives the command line that it would start, and this process runs it at full size."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sparseforge_ds.config.command_line import parse_arguments
from sparseforge_ds.extras.planner.activation_memory import Activations
from sparseforge_ds.extras.planner.dry_run import dry_run
from sparseforge_ds.train.trainer import main
from tests.distributed import PATIENCE, ROOT

LAUNCH = ROOT / "launch"

RECIPES = {
    "qwen3_14b.sh": 14_768_307_200,
    "qwen3_8b.sh": 8_190_735_360,
    "qwen3_1.7b.sh": 1_720_574_976,
    "deepseek_moe_16b.sh": 16_375_728_128,
    "opt_2.7b.sh": 2_651_596_800,
    "llama2_7b.sh 5B": 6_738_415_616,
    "llama2_7b.sh 1.25B": 6_738_415_616,
    "gpt2.sh small": 124_439_808,
    "gpt2.sh medium": 354_823_168,
    "gpt2.sh large": 774_030_080,
    "gpt2.sh xl": 1_557_611_200,
}
"""Recipe and the parameters of its model."""


@pytest.fixture
def bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a script of a copied launch/ whose commands only write their words down; (exit code, commands, stderr)."""
    # Stand-ins for the commands, first in the path; a test sets what they do and return.
    shutil.copytree(LAUNCH, tmp_path / "launch")
    commands = tmp_path / "commands"
    for name in ("python", "deepspeed", "srun", "scontrol"):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(
            f'#!/bin/bash\n[ "$1" = show ] && {{ echo first; echo second; exit; }}\n'
            f'case "$2" in *flag_names*) exec {sys.executable} "$@" ;; esac\n'  # reads names, and starts nothing
            f'printf "%s\\0" "{name}" "$@" >>{commands}; echo >>{commands}\n'
            f'eval "${{DOES_{name}:-}}"\n'
            f'exit "${{EXIT_{name}:-0}}"\n'
        )
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)

    def run(line: str, cwd: Path = tmp_path, **environment: str) -> tuple[int, list[list[str]], str]:
        commands.unlink(missing_ok=True)
        names = ("HOSTFILE", "GPUS", "MODEL", "DATASET", "STEPS", "OUTPUT", "CONFIG", "LAUNCHER")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        process = subprocess.run(
            ["bash", *line.split()],
            cwd=cwd,
            env={
                **clean,
                "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        ran = commands.read_text().splitlines() if commands.exists() else []
        return process.returncode, [entry.rstrip("\0").split("\0") for entry in ran], process.stderr

    return run


def dry(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """Do what a recipe's dry run starts: (exit code, stdout, stderr)."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert command[:2] == ["python", "launch/train.py"]
    code = main(command[2:], dry_run)
    return [code, *capsys.readouterr()]


def readme_row(recipe: str) -> list[str]:
    table = (LAUNCH / "README.md").read_text()
    return next(line for line in table.splitlines() if line.startswith(f"| `{recipe}` |")).split(" | ")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_resolves_the_whole_recipe(recipe, bash, capsys, monkeypatch):
    code, commands, _ = bash(f"launch/{recipe} --dry_run", OUTPUT="runs/nothing_here")
    assert code == 0 and len(commands) == 1
    code, text, errors = dry(commands[0], capsys, monkeypatch)
    assert (code, errors) == (0, "")
    assert f"{RECIPES[recipe]:,} parameters" in text
    assert f"{'99.9' if 'moe' in recipe else '100.0'}% of the linear weights" in text
    assert ("left dense" in text) == ("moe" in recipe)  # the routers
    assert re.search(r"schedule +.*frozen \d+-\d+", text)
    assert "its weights and tokenizer are on the hub" in text
    assert not (ROOT / "runs" / "nothing_here").exists()
    peak = re.search(r"peak +([0-9.]+) +of 80", text)
    assert peak is not None
    assert f"{float(peak[1]):.1f}" == readme_row(recipe)[7]


def test_a_recipe_goes_from_the_dense_model_to_the_numbers(bash):
    code, commands, _ = bash("launch/llama2_7b.sh 1.25B --save_every 100", DATASET="a/b=2 c/d=1", OUTPUT="/disk/run")
    assert code == 0
    assert [command[0] for command in commands] == ["deepspeed"] + 5 * ["python"]
    train = commands[0]
    assert train[1] == "launch/train.py" and train[-2:] == ["--save_every", "100"]
    for flag, *values in (
        ("--dataset", "a/b=2", "c/d=1"),
        ("--max_steps", "4768"),
        ("--global_batch", "64"),
        ("--output_dir", "/disk/run"),
    ):
        at = train.index(flag)
        assert train[at + 1 : at + 1 + len(values)] == values
    steps = [" ".join(command[3:5]) for command in commands[1:]]
    assert steps[0] == "consolidate /disk/run" and commands[1][5] == "/disk/run_2to4"
    assert steps[1] == "verify /disk/run_2to4"
    assert [command[4] for command in commands[3:]] == ["meta-llama/Llama-2-7b-hf", "/disk/run_2to4", "/disk/run_2to4"]
    assert commands[5][1:4] == ["-m", "sparseforge_ds", "evaluate"] and "--suite" in commands[5]


def test_flags_of_the_user_win(bash):
    _, commands, _ = bash("launch/gpt2.sh medium --dry-run --dataset own.jsonl --gpus 4 --max_steps 9", MODEL="/gpt2")
    assert [command[:2] for command in commands] == [["python", "launch/train.py"]]
    flags = vars(parse_arguments(commands[0][2:]))
    # A second --dataset would be mixed with the first.
    expected = {"dataset": ["own.jsonl"], "gpus": 4, "max_steps": 9, "model": "/gpt2", "dry_run": True}
    assert expected.items() <= flags.items()
    _, commands, _ = bash("launch/opt_2.7b.sh", MODEL="/opt")
    assert commands[0][2:4] == ["--model", "/opt"] and commands[3][4] == "/opt"


@pytest.mark.parametrize("alias", ["--dataset_name own.jsonl", "--train-file=own.jsonl", "--data_path own.jsonl"])
def test_a_text_by_another_trainers_name_is_not_mixed_with_that_of_the_recipe(bash, alias):
    _, commands, _ = bash(f"launch/gpt2.sh small {alias} --dry_run")
    assert parse_arguments(commands[0][2:]).dataset == ["own.jsonl"]


@pytest.mark.parametrize("flag", ["--epochs 2", "--num_train_epochs=2"])
def test_epochs_take_the_place_of_the_recipes_own_steps(bash, flag):
    code, commands, errors = bash(f"launch/llama2_7b.sh 5B --dataset own.jsonl {flag}")
    assert code == 0, errors
    arguments = parse_arguments(commands[0][2:])
    assert (arguments.epochs, arguments.max_steps) == (2, None)
    # Steps that the user gives as well are another length.
    code, commands, errors = bash(f"launch/llama2_7b.sh 5B {flag}", STEPS="7")
    assert (code, commands) == (2, []) and errors == "llama2_7b: give STEPS or --epochs, not both\n"
    _, commands, _ = bash(f"launch/llama2_7b.sh 5B {flag} --max_steps 7")
    with pytest.raises(ValueError, match="without --max_steps, which is 7; give one of them"):
        parse_arguments(commands[0][2:])


@pytest.mark.parametrize(
    "flag", ["--model x", "--output_dir x", "--output-dir=x", "--model_name_or_path x", "--base-model=x"]
)
def test_what_the_rest_of_a_recipe_needs_too_is_no_flag(bash, flag):
    code, commands, errors = bash(f"launch/qwen3_8b.sh {flag}")
    assert (code, commands) == (2, [])
    assert errors.startswith("qwen3_8b: say ")


def test_a_recipe_goes_on_after_its_training(bash, tmp_path):
    run, sparse = tmp_path / "disk" / "run", tmp_path / "disk" / "run_2to4"
    sparse.mkdir(parents=True)
    (sparse / "sparsity.json").touch()
    code, commands, errors = bash("launch/qwen3_8b.sh", OUTPUT=str(run))
    assert (code, commands) == (2, []) and "is there already" in errors  # before the training, not after it
    run.mkdir()
    (run / "result.json").touch()
    os.utime(sparse / "sparsity.json", (2e9, 2e9))
    code, commands, _ = bash("launch/qwen3_8b.sh --resume", OUTPUT=str(run))
    assert code == 0
    assert [command[3] for command in commands[1:2]] == ["verify"] and len(commands) == 5
    (run / "result.json").write_text('{\n  "steps": 5000,\n  "seconds": 7\n}\n')
    for line, steps in (("--resume", "5001"), ("--resume --max-steps 5002 --max_steps=5003", "1")):
        code, commands, errors = bash(f"launch/qwen3_8b.sh {line}", OUTPUT=str(run), STEPS=steps)
        assert (code, commands) == (2, []) and "is of 5000 steps, and" in errors and "go on to 500" in errors
    assert bash("launch/qwen3_8b.sh --resume", OUTPUT=str(run), STEPS="5000")[0] == 0
    os.utime(run / "result.json", (2e9 + 1, 2e9 + 1))
    assert bash("launch/qwen3_8b.sh --resume", OUTPUT=str(run))[0] == 2


def test_a_hostfile_goes_to_the_launcher_and_an_error_ends_the_recipe(bash, tmp_path):
    code, commands, _ = bash("launch/opt_2.7b.sh", HOSTFILE="launch/hostfile.example", EXIT_deepspeed="3")
    assert code == 3
    assert [command[:4] for command in commands] == [
        ["deepspeed", "--hostfile", f"{tmp_path}/launch/hostfile.example", "launch/train.py"]
    ]
    code, commands, errors = bash("launch/opt_2.7b.sh", HOSTFILE="hosts")
    assert (code, commands) == (2, []) and "HOSTFILE=hosts: no such file" in errors


@pytest.mark.parametrize("line", ["launch/llama2_7b.sh", "launch/gpt2.sh huge", "launch/slurm.sh"])
def test_what_is_missing_is_said(bash, line):
    code, commands, errors = bash(line)
    assert (code, commands) == (2, [])
    assert errors.startswith("usage: ")


def test_more_gpus_than_the_recipe_is_made_for(bash, capsys, monkeypatch):
    """64 sequences on 64 GPUs leave one for each."""
    monkeypatch.setattr("sparseforge_ds.extras.planner.plan.trace", lambda *_, **__: Activations(0, 0, 0, 0))
    _, commands, _ = bash("launch/gpt2.sh medium --dry_run", GPUS="64")
    code, _, errors = dry(commands[0], capsys, monkeypatch)
    assert code == 1
    assert "train_batch_size = 64 cannot be divided" in errors and "--micro_batch" in errors
    _, commands, _ = bash("launch/gpt2.sh medium --dry_run --micro_batch 1", GPUS="64")
    code, text, _ = dry(commands[0], capsys, monkeypatch)
    assert code == 0
    assert "64 x 1024 tokens = 1 a rank x 1 accumulated x 64 ranks" in text


def test_slurm_starts_the_ranks_and_queues_a_stopped_run_again(bash, tmp_path):
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "8"}
    code, commands, _ = bash("launch/slurm.sh launch/gpt2.sh large", **job)
    assert code == 0
    srun = ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=8", "bash", "launch/slurm.sh", "--rank"]
    assert commands[0][:7] == [*srun, "launch/train.py"]
    assert commands[0][-2:] == ["--resume", "auto"]
    assert len(commands) == 6
    code, commands, _ = bash("launch/slurm.sh launch/gpt2.sh large", **job, EXIT_srun="143")
    assert code == 143
    assert commands[-1] == ["scontrol", "requeue", "77"] and len(commands) == 2
    # No job's port is one that the kernel may have given to somebody.
    for number in (12767, 19999, 4_000_000_000):
        job["SLURM_JOB_ID"] = str(number)
        assert (
            bash("launch/slurm.sh launch/gpt2.sh large", **job, DOES_srun=f"echo $MASTER_PORT >{tmp_path}/port")[0] == 0
        )
        assert 20_000 <= int((tmp_path / "port").read_text()) < 32_768
    rank = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"}
    assert bash("launch/slurm.sh --rank launch/train.py --x", **rank)[1] == [["python", "launch/train.py", "--x"]]


ABLATIONS = ("full", "no_slorb", "magnitude", "no_distillation", "teacher_13b", "paper_like", "block16")


@pytest.mark.parametrize("which", ABLATIONS)
def test_an_ablation_is_the_recipe_with_another_block(which, bash, tmp_path):
    code, commands, _ = bash(f"launch/llama2_ablations.sh {which} --dry_run", OUTPUT=str(tmp_path / "run"))
    assert code == 0 and len(commands) == 2
    made, train = commands
    assert made[:2] == ["python", "launch/with_block.py"] and made[3] == f"{tmp_path}/run.json"
    assert with_block(*made[2:]) == (0, "")
    content = json.loads((tmp_path / "run.json").read_text())
    base = json.loads((ROOT / made[2]).read_text())
    assert {**content, "sparseforge": None} == {**base, "sparseforge": None}
    block = content["sparseforge"]
    assert block != base["sparseforge"] and {**block, **base["sparseforge"], **json.loads(made[4])} == block
    arguments = parse_arguments(train[2:])
    assert arguments.deepspeed == f"{tmp_path}/run.json" and arguments.max_steps == 20000
    assert arguments.teacher == ("meta-llama/Llama-2-13b-hf" if which == "teacher_13b" else None)
    head = (LAUNCH / "llama2_ablations.sh").read_text()
    assert f"    {which}) block=" in head and bash("launch/llama2_ablations.sh")[0] == 2


def with_block(*words: str) -> tuple[int, str]:
    """Run the script in this process; its exit code, and what it says of an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["launch/with_block.py", *words])
        try:
            runpy.run_path("launch/with_block.py", run_name="__main__")
        except SystemExit as stop:
            return 1, str(stop.code)
    return 0, ""


@pytest.mark.parametrize("recipe", ["gpt2.sh small", "llama2_ablations.sh full"])
def test_other_paths_than_the_hostfiles_are_seen_from_the_checkout(bash, tmp_path, recipe):
    own = tmp_path / "own"
    own.mkdir()
    paths = {"MODEL": "some/model", "OUTPUT": "some/run", "DATASET": "some/text.jsonl"}
    working_folder = {"DOES_deepspeed": f"pwd >{tmp_path}/folder", "EXIT_deepspeed": "3"}
    code, commands, errors = bash(f"../launch/{recipe}", cwd=own, **paths, **working_folder)
    assert code == 3, errors
    assert (tmp_path / "folder").read_text().strip() == str(tmp_path)
    assert {"some/model", "some/text.jsonl"} <= set(commands[-1]) and any("some/run" in word for word in commands[-1])


def test_the_hostfile_of_an_ablation_is_that_of_where_it_is_called(bash, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "hosts").touch()
    for hostfile in ("hosts", f"{own}/hosts"):
        line = "../launch/llama2_ablations.sh full"
        code, commands, errors = bash(
            line, cwd=own, HOSTFILE=hostfile, OUTPUT=str(tmp_path / "run"), EXIT_deepspeed="3"
        )
        assert code == 3, errors
        assert commands[-1][:3] == ["deepspeed", "--hostfile", f"{own}/hosts"]
    code, commands, errors = bash(
        "launch/llama2_ablations.sh full --dry_run", OUTPUT=str(tmp_path / "run"), HOSTFILE=""
    )
    assert code == 0, errors


def test_a_wrong_key_is_found_before_a_recipe_starts(tmp_path):
    """In a process of its own, as recipes start it."""
    command = [sys.executable, "launch/with_block.py", "ds_configs/zero3.json", str(tmp_path / "x.json"), '{"k": 1}']
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1 and process.stderr.startswith("error: ") and not (tmp_path / "x.json").exists()


def test_a_block_is_put_into_any_json_that_the_launcher_takes(bash, tmp_path):
    """CONFIG of an ablation as that of its recipe: a name in the package."""
    out = tmp_path / "run.json"
    _, commands, _ = bash("launch/llama2_ablations.sh magnitude", CONFIG="zero1", OUTPUT=str(tmp_path / "run"))
    assert commands[0][:2] == ["python", "launch/with_block.py"]
    assert with_block(*commands[0][2:]) == (0, "")
    content = json.loads(out.read_text())
    assert content["zero_optimization"]["stage"] == 1 and content["sparseforge"]["importance"] == "magnitude"
    out.unlink()
    for name, text, message in (
        ("twice", '{"sparseforge": {}, "sparseforge": {}}', 'key "sparseforge" comes twice in one object'),
        ("list", "[]", 'not a JSON object with an object "sparseforge"; give a DeepSpeed JSON'),
        ("number", '{"sparseforge": 3}', 'not a JSON object with an object "sparseforge"; give a DeepSpeed JSON'),
        ("broken", '{"sparseforge": {},}', "no comma may stand before"),
    ):
        base = tmp_path / f"{name}.json"
        base.write_text(text)
        code, errors = with_block(str(base), str(out), "{}")
        assert code == 1 and errors.startswith(f"error: {base}: ") and message in errors
    code, errors = with_block("zero3", str(out), "[]")
    assert code == 1 and errors.startswith("error: KEYS: not a JSON object")
    code, errors = with_block("zero9", str(out), "{}")
    assert code == 1 and errors.startswith("error: zero9: no such file; give a path, or the name of a configuration")
    assert not out.exists()


def test_the_readme_has_the_same_numbers():
    for recipe in RECIPES:
        cells = readme_row(recipe)
        head = (LAUNCH / recipe.split()[0]).read_text()
        messages = re.search(r"Planned peak of a GPU: (.*) GiB of 80", head)
        assert messages is not None and cells[7] in messages[1].split(", ")
        assert f"gpus={cells[1]}\n" in head
        assert cells[5].replace(",", "") in head


def test_the_comparison_of_fixed_masks_trains_and_checks(bash, tmp_path):
    """Ranks that divide the batch, files of where it is called, and the end of a log where something fails."""
    (tmp_path / "launch" / "install.sh").write_text("")
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    own = tmp_path / "own"
    own.mkdir()
    (own / "text.jsonl").touch()
    line = "../launch/fixed_mask_comparison.sh"
    code, commands, errors = bash(line, cwd=own)
    assert (code, commands) == (2, []) and errors.count("fixed_mask_comparison.sh MODEL TRAIN_TEXT") == 1
    broken = 'case "$*" in *verify*) echo not 2:4; exit 1 ;; esac; echo 6'
    code, commands, errors = bash(f"{line} org/model text.jsonl {own}/text.jsonl", cwd=own, DOES_python=broken)
    assert code == 1 and errors.splitlines()[-1] == "not 2:4"
    train = next(command for command in commands if command[0] == "deepspeed")
    assert train[1:5] == ["--num_gpus", "4", "--master_port", "6"], "a port that Python has found free"
    for flag, value in (("--model", "org/model"), ("--dataset", f"{own}/text.jsonl")):
        assert train[train.index(flag) + 1] == value


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_bash_can_parse_it(script):
    """Bash before 4.4 too, where `set -u` takes an empty array for one that is not set."""
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert set(re.findall(r'(?<!\+)"\$\{(\w+)\[@\]\}"', script.read_text())) <= {"launcher"}  # never empty
