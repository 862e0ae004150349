"""The package without `extras`: a copy trains under a launcher, resumes, exports and verifies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sparseforge_ds.train.launcher import free_port
from tests.distributed import PATIENCE, ROOT
from tests.tiny_folders import deepspeed_json, write_json, write_model, write_text

FINISH = """
import os, sys
from sparseforge_ds.cli.main import main
assert main(["train", *sys.argv[1:], "--resume"]) == 0
assert "MASTER_PORT" not in os.environ  # else the next run without a launcher would listen where this one does
assert main(["consolidate", "run", "sparse"]) == 0
assert main(["verify", "sparse"]) == 0
"""


def test_a_copy_without_extras_trains_resumes_exports_and_verifies(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "sparseforge_ds"
    shutil.copytree(ROOT / "sparseforge_ds", copy, ignore=shutil.ignore_patterns("extras", "*.pyc.*"))  # with bytecode
    (copy / "extras.py").write_text("raise ImportError")  # else an editable install would be found in its place
    flags = {
        "deepspeed": write_json(tmp_path / "ds.json", deepspeed_json(stage=1, batch=2, max_steps=4)),
        "model": write_model(tmp_path / "dense"),
        "dataset": write_text(tmp_path / "text.jsonl"),
        **{"output_dir": "run", "seq_length": 32, "save_every": 2, "report_to": "none"},
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "1", "--master_port", str(free_port())]
    launcher += ["--no_local_rank", "--module", "sparseforge_ds", "train"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "copy")}
    checkpoints = tmp_path / "run" / "checkpoints"
    for command in ([*launcher, *words], [sys.executable, "-c", FINISH, *words]):
        if (checkpoints / "latest").exists():  # as if the first command had been stopped halfway
            shutil.rmtree(checkpoints / "step_000004")
            (checkpoints / "latest").write_text("step_000002")
        process = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert process.returncode == 0, process.stdout + process.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps_of_this_launch"] == 2
    assert json.loads((tmp_path / "sparse" / "sparsity.json").read_text())["finished"]
