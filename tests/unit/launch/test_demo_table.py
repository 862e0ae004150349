"""The table of the demo, made by the script from the files that the tools write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "demo_table.py"


def test_every_number_is_in_the_table(tmp_path: Path) -> None:
    # The files that the demo leaves, with numbers that are told apart.
    files = {
        "ds_config.json": {"train_batch_size": 8},
        "sparseforge.json": {
            "config": {"max_steps": 400, "pattern": "2:4"},
            "run": {"seq_length": 256},
            "coverage": {"masked": 750, "linear": 750, "total": 1000, "weights": 3},
        },
        "dense.json": {"perplexity": {"perplexity": 10.0}},
        "one_shot.json": {"perplexity": {"perplexity": 20.0}},
        "sparse.json": {"perplexity": {"perplexity": 11.0}},
        "verify.json": {"groups": 123456, "violations": 0},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    command = [sys.executable, str(SCRIPT), str(tmp_path), "runs/result", str(tmp_path), "125"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Every number of theirs has a line.
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert "held-out perplexity dense 10.000" in lines
    assert "one-shot magnitude 2:4 20.000 (100.0% above dense)" in lines
    assert "SparseForge 2:4 11.000 (10.0% above dense)" in lines
    assert "under a mask of the linear weights 100.0%" in lines
    assert "of all parameters 75.0%" in lines
    assert "2:4 groups checked 123,456" in lines
    assert "violations 0" in lines
    assert "training tokens 819,200 (400 steps of 8 x 256)" in lines
    assert "time 2 min 5 s" in lines
    assert f"to look at it .venv/bin/tensorboard --logdir {tmp_path}/tensorboard" in lines
    assert any(line.startswith("result model runs/result ") for line in lines)
