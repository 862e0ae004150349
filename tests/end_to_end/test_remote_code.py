"""The commands that asked `Do you wish to run the custom code? [y/N]`, with `yes |` before them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.distributed import PATIENCE, ROOT
from tests.planted_code import YES, plant_model
from tests.tiny_folders import write_model, write_text


def test_yes_runs_no_planted_code(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    run = tmp_path / "run"
    text = write_text(tmp_path / "text.jsonl")
    # Planted code leaves a mark when it runs.
    mark = plant_model(planted, write_model(tmp_path / "dense"))
    launch = [sys.executable, "launch/train.py", "--deepspeed", "ds_configs/zero3.json"]
    commands = [
        [*launch, "--model", planted, "--dataset", text, "--output_dir", run],
        [sys.executable, "-m", "sparseforge_ds", "evaluate", planted, "--text", text],
    ]
    # Both commands get a yes on their input, for whoever would ask.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    started = [
        subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command in commands
    ]
    # Neither asks; both refuse, and the code did not run.
    for process in started:
        output, _ = process.communicate(YES, timeout=PATIENCE)
        assert process.returncode in (1, 2), output
        assert "needs Python code of its own (auto_map" in output and "custom code? [y/N]" not in output, output
    assert not mark.exists()
    assert not run.exists()
