"""Programs of Triton's interpreter, which a process chooses before it imports Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed import PATIENCE, ROOT


def run_interpreted(*arguments: str) -> None:
    """Run Python with these arguments under Triton's interpreter, and assert that it ends well."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, process.stderr[-3000:]
