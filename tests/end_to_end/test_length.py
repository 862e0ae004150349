"""A run of so many epochs; and one that was finished and goes on: what is frozen stays, the finetune continues."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.cli.main import main
from sparseforge_ds.export.run_source import RunSource
from tests.distributed import run_distributed
from tests.end_to_end.test_train import differences, flags_of, run_trainer, states, train
from tests.tiny_folders import deepspeed_json, write_text


def test_a_finished_run_goes_on_and_its_masks_stay(tmp_path, capfd):
    """8 steps, then 12; the second part whole, and interrupted, on the ranks and stage of the first and on others."""
    flags = flags_of(tmp_path, deepspeed_json(2), save_every=2, keep_checkpoints=0)
    train(*flags)
    checkpoints = tmp_path / "run" / "checkpoints"
    train(*flags, "--resume", "--max_steps=12")
    output = capfd.readouterr().out
    assert (
        "laid out over 8 steps; the finetune goes on to 12 at the rate of step 8" in output and "step 12/12" in output
    )
    # Interrupted and resumed, the second part has the same bits.
    straight = states(checkpoints / "step_000012")
    shutil.rmtree(checkpoints / "step_000012")
    train(*flags, "--resume", "--max_steps=12")
    assert differences(straight, states(checkpoints / "step_000012")) == []
    # Masks are those of step 8, and every weight was trained.
    saved = [RunSource(checkpoints / name) for name in ("step_000008", "step_000012")]
    trained = 0
    for name in saved[0].prunable:
        before, after = (source.read(name) != 0 for source in saved)
        assert (before == after).all()
        trained += not (saved[0].read(name) == saved[1].read(name)).all()
    assert trained == len(saved[0].prunable), "and the weights were trained"
    # What the run says of itself: the schedule of 8 steps, and 12 that are done.
    assert Checkpoint(checkpoints / "step_000012").client_state["sparseforge"]["config"]["max_steps"] == 8
    assert main(["inspect", str(tmp_path / "run"), "--quick"]) == 0
    assert "12 of 12, finished" in capfd.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 12

    # On one rank to 14. Fewer steps than are done are refused, and the folder stays as it is.
    train(*flags, "--resume", "--max_steps=12")  # complete
    train(*flags, "--resume", "--max_steps=14", ranks=1)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 14
    record = (tmp_path / "run" / "sparseforge.json").read_text()
    for fewer in (10, 8):  # more than it was laid out over, and as many
        capfd.readouterr()
        assert run_distributed(run_trainer, 1, [*flags, "--resume", f"--max_steps={fewer}"]) == [1]
        assert f"--max_steps {fewer}: the run in {tmp_path / 'run'} is already at step 14" in capfd.readouterr().out
    assert (tmp_path / "run" / "sparseforge.json").read_text() == record


def test_a_schedule_of_transformers_resumes_to_the_bit_and_goes_on_at_its_last_rate(tmp_path, capfd):
    """8 steps, the last 4 again after a resume, and 10: warm-up, plateau and decay of transformers."""
    more = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": '{"num_decay_steps": 4}'}
    flags = flags_of(tmp_path, deepspeed_json(1), warmup=0.25, log_every=1, keep_checkpoints=0, **more)
    train(*flags)
    output = capfd.readouterr().out
    assert '0.001 after 2 warm-up steps, warmup_stable_decay {"num_decay_steps": 4} of transformers to' in output
    assert [float(rate) for rate in re.findall(r"lr (\S+)", output)[:5]] == [1e-4, 5.5e-4, 1e-3, 1e-3, 1e-3]
    record = json.loads((tmp_path / "run" / "sparseforge.json").read_text())["run"]
    assert {name: record[name] for name in more} == more
    checkpoints = tmp_path / "run" / "checkpoints"
    straight = states(checkpoints / "step_000008")
    shutil.rmtree(checkpoints / "step_000008")
    train(*flags, "--resume")
    assert differences(straight, states(checkpoints / "step_000008")) == []
    capfd.readouterr()
    result = tmp_path / "run" / "result.json"
    path = json.loads(result.read_text())["path"]
    train(*flags, "--resume", "--max_steps=10", "--learning_rate=0.004")
    rates = re.findall(r"lr (\d\S+)", capfd.readouterr().out)
    assert len(set(rates)) == 1 and 4e-4 < float(rates[0]) < 4e-3
    # The path is that of the rates that every launch has used.
    used = [float(rate) for rate in re.findall(r"lr (\S+)", output)[:8]]
    assert json.loads(result.read_text())["path"] / path == pytest.approx(1 + 2 * float(rates[0]) / sum(used), rel=0.02)
    # Where transformers cannot make the schedule, the run ends before it begins.
    short = flags_of(
        tmp_path, deepspeed_json(1), output_dir=tmp_path / "other", lr_scheduler_type="warmup_stable_decay"
    )
    assert run_distributed(run_trainer, 1, short) == [1]
    assert "required positional argument: 'num_decay_steps'" in capfd.readouterr().out


def test_runs_that_cannot_become_longer_are_refused(tmp_path, capfd):
    """Fewer steps; a learning rate of 0; and soft masks, whose schedule would be another. Masks freeze at step 6."""
    flags = flags_of(tmp_path, deepspeed_json(0), save_every=4)
    train(*flags, ranks=1)
    for more, kept, message in (
        (["--max_steps=6"], "step_000008", "is laid out over 8 steps, here 6"),
        (["--max_steps=12", "--min_lr_ratio=0"], "step_000008", "so that more steps would change nothing"),
        (["--max_steps=12"], "step_000004", "is laid out over 8 steps, here 12"),
    ):
        for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
            if path.name > kept:
                shutil.rmtree(path)
        assert run_distributed(run_trainer, 1, [*flags, "--resume", *more]) == [1]
        assert message in capfd.readouterr().out


def test_epochs_leave_a_folder_of_others_alone(tmp_path, capfd):
    flags = flags_of(tmp_path, deepspeed_json(1), epochs=1)
    other = tmp_path / "run" / "model" / "config.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    for more in ([], ["--resume=auto"]):
        capfd.readouterr()
        assert run_distributed(run_trainer, 1, [*flags, *more]) == [1]
        assert "holds model, which a run would replace" in capfd.readouterr().out
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"], "and no tokens were written there"


def test_epochs_give_the_number_of_steps(tmp_path, capsys):
    """20 documents are 49 windows of 32 tokens: with 4 a step, one and a half epochs are 19 steps."""
    write_text(tmp_path / "short.jsonl", documents=20)
    flags = [flag for flag in flags_of(tmp_path, deepspeed_json(1), save_every=0) if "--dataset" not in flag]
    train(*flags, f"--dataset={tmp_path / 'short.jsonl'}", "--epochs=1.5")
    output = capsys.readouterr().out
    tokens = next((tmp_path / "run" / "data").glob("*.json"))
    windows = json.loads(tokens.read_text())["tokens"] // 32
    steps = -(-windows * 3 // 8)
    assert f"--epochs 1.5: {steps} steps" in output
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == steps
