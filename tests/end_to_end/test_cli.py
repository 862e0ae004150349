"""The `sparseforge` command as users run it: on a real run, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sparseforge_ds.cli.main import main
from sparseforge_ds.mask.kernels.codes import values_of
from tests.distributed import PATIENCE, ROOT, run_distributed
from tests.fuzz.inputs import RUNS, train_all, write_model_and_text

COMMANDS = {"module": [sys.executable, "-m", "sparseforge_ds"]}
if (script := Path(sys.executable).with_name("sparseforge")).is_file():
    COMMANDS["console script"] = [str(script)]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on two ranks at ZeRO-2, saved at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("cli")
    write_model_and_text(folder)
    run_distributed(train_all, 2, str(folder), {"stage2_fp32": RUNS["stage2_fp32"]})
    return folder / "stage2_fp32"


@pytest.fixture
def damaged(run_folder: Path, tmp_path: Path) -> Path:
    """Copy the run, to be damaged."""
    shutil.copytree(run_folder, tmp_path / "run")
    return tmp_path / "run"


def call(*arguments: str | Path, command: str = "module", **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*COMMANDS[command], *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, **kwargs
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_inspect_describes_a_finished_run(run_folder: Path, command: str) -> None:
    process = call("inspect", run_folder, "--check", command=command)
    assert (process.returncode, process.stderr) == (0, "")
    for part in (
        "step        6 of 6, finished (hardening 2-4), 384 tokens",
        "layout      2 ranks, ZeRO-2, float32",
        "coverage    2:4 in 7 weights: 100.0% of the linear weights between embedding and head and 35.1% of all "
        "parameters under a mask (26,208 in all)",
        "mask        100.00% exactly 0 or 1, 0.00% undecided (0.05 to 0.95)",
        "hard mask: density 50.00%\n",  # nothing is left of what was pruned, to compare with
        "result      steps 6, tokens 384, seconds",
        f"torch {torch.__version__}",
        "checkpoint  step_000003  step 3  0.",
        "complete    yes, all checksums agree",
    ):
        assert part in process.stdout


def test_inspect_shows_masks_that_still_move(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run_folder / "checkpoints" / "step_000003"
    assert main(["inspect", str(checkpoint)]) == 0
    assert "hard mask: density 50.00%, agrees with the largest |W| in" in capsys.readouterr().out
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)["status"]
    assert (content["step"], content["max_steps"], content["phase"]) == (3, 6, "hardening")
    assert content["hardening"] == [2, 4] and content["zero_stage"] == 2 and content["world_size"] == 2
    masks = content["masks"]
    assert len(masks) == content["masked_weights"] == 7
    assert masks == sorted(masks, key=lambda mask: -mask["undecided"])
    assert all(0 < mask["undecided"] < 1 and mask["density"] == 0.5 and not mask["strange"] for mask in masks)


def test_the_masks_are_those_of_the_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the shards themselves: at ZeRO-2 a rank's state is a piece of all masks, end to end."""
    folder = run_folder / "checkpoints" / "step_000003"
    undecided = elements = 0
    for file in folder.glob("*optim_states.pt"):
        content = torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
        for state in content["state"].values():
            if "mask" in state:
                mask = values_of(state["mask"])
                undecided += int(((mask > 0.05) & (mask < 0.95)).sum())
                elements += state["mask"].numel()
    assert main(["inspect", str(folder), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["mask"]
    assert elements >= output["elements"] == 9216
    assert output["undecided"] == pytest.approx(undecided / 9216, abs=1e-12)


def test_quick_reads_no_masks(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run_folder / "checkpoints"), "--quick"]) == 0
    text = capsys.readouterr().out
    assert "coverage    2:4 in 7 weights" in text and "undecided" not in text


@pytest.mark.parametrize("damage", ["cut", "missing", "flipped", "other step", "empty folder"])
def test_inspect_names_the_damage_of_a_run(damaged: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    newest = damaged / "checkpoints" / "step_000006"
    file = sorted(newest.glob("*optim_states.pt"))[1]
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-100])
    elif damage == "missing":
        file.unlink()
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "other step":
        shutil.copy(damaged / "checkpoints" / "step_000003" / file.name, file)
    else:
        (damaged / "checkpoints" / "step_000009").mkdir()
    assert main(["inspect", str(damaged), "--check"]) == 1
    text = capsys.readouterr().out
    assert "complete    NO" in text
    assert (file.name if damage != "empty folder" else "step_000009: no *_model_states.pt") in text.split("problem", 1)[
        1
    ]


@pytest.mark.parametrize("step", [3, 6])
def test_check_says_of_every_checkpoint_whether_it_is_whole(
    damaged: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    file = next((damaged / "checkpoints" / f"step_{step:06d}").glob("*model_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["inspect", str(damaged), "--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    states = {line.split()[1]: line.split()[-1] for line in lines if line.startswith("checkpoint ")}
    assert states == {f"step_{n:06d}": "DAMAGED" if n == step else "complete" for n in (3, 6)}
    (problem,) = (line for line in lines if line.startswith("problem"))
    assert str(file) in problem and lines[-1] == "complete    NO"
    assert any(line.startswith("step ") for line in lines) == (step == 3)  # where the run stands, by its newest


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_consolidate_names_a_whole_checkpoint(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    file = sorted((damaged / "checkpoints" / "step_000006").glob("*optim_states.pt"))[1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink() if damage == "missing" else file.write_bytes(content)
    assert main(["consolidate", str(damaged), str(tmp_path / "out"), "--skip_proof"]) == 2
    full = damaged / "checkpoints" / "step_000003"
    assert capsys.readouterr().err.endswith(f"; the newest intact one beside it is {full}\n")
    assert main(["consolidate", str(full), str(tmp_path / "out"), "--skip_proof"]) == 0


def test_leftovers_are_listed(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (damaged / "checkpoints" / "step_000009.tmp").mkdir()
    assert main(["inspect", str(damaged)]) == 0
    assert "leftover    step_000009.tmp, of an interrupted save" in capsys.readouterr().out


def test_inspect_describes_a_checkpoint_of_another_program(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = damaged / "checkpoints" / "step_000006"
    file = folder / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    del content["sparseforge"], content["train"]
    torch.save(content, file)
    foreign = damaged.parent / "global_step6"
    foreign.mkdir()
    for path in folder.glob("*.pt"):
        shutil.copy(path, foreign)
    assert main(["inspect", str(foreign)]) == 0
    text = capsys.readouterr().out
    assert "step        6\n" in text and "layout      2 ranks, ZeRO-2, float32" in text
    assert "26,208 parameters; not saved by SparseForge" in text


def test_an_export_is_not_a_run(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"look into it with: sparseforge verify {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["inspect", "RUN", "--json"], ["train", "--dry_run", "--deepspeed", "ds_configs/zero1.json"]],
    ids=["inspect", "train"],
)
def test_a_reader_that_has_seen_enough_ends_the_command_in_silence(words: list[str], run_folder: Path) -> None:
    process = subprocess.Popen(
        [*COMMANDS["module"], *(word.replace("RUN", str(run_folder)) for word in words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdout = None  # which `communicate` would read
    _, errors = process.communicate(timeout=PATIENCE)
    assert b"error" not in errors and b"Traceback" not in errors
    assert process.returncode == 141


def test_ctrl_c_ends_a_command_in_one_line(tmp_path: Path) -> None:
    """While it waits for a file that never ends: a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "report.json")
    shutil.copytree(ROOT / "sparseforge_ds" / "assets" / "stdlib_llama", tmp_path / "model")
    process = subprocess.Popen(
        [
            *COMMANDS["module"],
            "verify",
            str(tmp_path / "model"),
            "--pattern",
            "2:4",
            "--json",
            tmp_path / "report.json",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored below a shell's background job
    )
    # Wait until it is about to open the pipe, in the middle of its work.
    kernel_wait = Path(f"/proc/{process.pid}/wchan")
    for _ in range(600):
        if kernel_wait.read_text() == "wait_for_partner":
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (130, "error: interrupted\n")


def test_a_folder_that_may_not_be_read(run_folder: Path, tmp_path: Path) -> None:
    process = call("inspect", tmp_path / ("x" * 300))
    assert process.returncode == 2 and process.stderr.count("\n") == 1 and "Traceback" not in process.stderr
