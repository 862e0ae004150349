"""The notebook that new users open runs from top to bottom, and holds nothing of the machine that wrote it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import PATIENCE, ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def test_the_notebook_is_saved_without_results() -> None:
    for cell in CELLS:
        assert cell["cell_type"] in ("markdown", "code") and cell["id"] and cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def test_the_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="its figures need matplotlib: pip install '.[compare]'")
    # Plain Python, so that the tests need no Jupyter; a magic command would be an error here.
    code = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code")
    figures = code.replace("plt.show()", f"plt.savefig({str(tmp_path)!r} + f'/{{plt.gcf().number}}.png')")
    (tmp_path / "quickstart.py").write_text(figures)
    process = subprocess.run(
        [sys.executable, str(tmp_path / "quickstart.py")],
        env={**os.environ, "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    assert process.stdout.count("This module provides") == 2, "text of the dense and of the sparse model"
    assert len(list(tmp_path.glob("*.png"))) == 2
    assert "proved: loaded by transformers" in process.stdout and re.search(r"\bKL\b", process.stdout), process.stdout
    assert str(tmp_path) not in process.stdout.replace("\n", ""), "paths of the machine are cut"
