"""benchmarks/consolidation.py by its command line, at a size that only shows that every number is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.distributed import PATIENCE, ROOT


def test_every_number_is_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()  # of somebody else: what is measured is named after the run
    size = ["--hidden=256", "--layers=1", "--vocabulary=64", "--ranks=2", "--repeats=1", "--workers=2"]
    script = str(ROOT / "benchmarks" / "consolidation.py")
    command = [script, tmp_path.name, *size, "--json", str(tmp_path / "report.json")]  # a folder of where it is called
    process = subprocess.run(
        [sys.executable, *command, "--cold"],
        cwd=tmp_path.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["page_cache"] == "cold" and "page cache cold" in process.stdout
    rows = {(row["what"], row["workers"]): row for row in report["rows"]}
    assert list(rows) == [("copy", 1), ("consolidate", 2), ("read", 1), ("verify", 2)]
    assert all(row["seconds"] > 0 and row["peak"] >= row["own"] > 0 for row in rows.values())
    assert rows["copy", 1]["ratio"] == rows["read", 1]["ratio"] == 1
    assert rows["consolidate", 2]["goal"] == 2 and rows["verify", 2]["goal"] == 3
    assert report["bytes"]["checkpoint"] > 5 * report["bytes"]["model"] > 10**6
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["model", "model_run_256_1_64_2", "report.json", "run_256_1_64_2"]
