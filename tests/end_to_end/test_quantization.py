"""Zeros of a 2:4 model that ways of quantizing keep: the table of docs/guides/quantization.md, measured.

llm-compressor and torchao live in an environment of their own, which SPARSEFORGE_QUANTIZATION_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparseforge_ds.export.formats import export
from tests.distributed import PATIENCE, ROOT
from tests.sparse_folders import ModelSource

PYTHON = os.environ.get("SPARSEFORGE_QUANTIZATION_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None,
    reason="needs SPARSEFORGE_QUANTIZATION_PYTHON, the interpreter of an environment with llmcompressor and torchao "
    "(docs/guides/quantization.md)",
)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [str(PYTHON), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_rounding_to_nearest_keeps_the_zeros_and_gptq_does_not(assets: Path, tmp_path: Path) -> None:
    """Rounding to nearest keeps every zero; GPTQ moves the error of a column into the pruned entries behind it."""
    dense = assets / "models" / "books-6m"
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    export(ModelSource(model, dense, torch.bfloat16), tmp_path / "sparse", skip_proof=True)
    made = run(str(ROOT / "tests" / "quantize_folder.py"), str(tmp_path / "sparse"), str(tmp_path), cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-3000:]
    reports: dict[str, dict[str, Any]] = {}
    for way in ("rtn-int8", "rtn-fp8", "rtn-int4", "gptq-int8", "gptq-int4"):
        file = tmp_path / f"{way}.json"
        more = ["--pattern", "2:4", "--json", str(file)]
        verified = run("-m", "sparseforge_ds", "verify", str(tmp_path / way), *more, cwd=tmp_path)
        reports[way] = json.loads(file.read_text())
        assert reports[way]["quantized"] == 42 == reports[way]["weights"]
        assert verified.returncode == (0 if way.startswith("rtn") else 1), verified.stderr
        kept = "kept every group" if way.startswith("rtn") else "did not keep the pattern"
        assert f"42 of the folder's weights are quantized: the quantization {kept}" in verified.stdout
    broken = {way: report["violations"] / report["groups"] for way, report in reports.items()}
    assert broken["rtn-int8"] == broken["rtn-fp8"] == broken["rtn-int4"] == 0
    assert broken["gptq-int8"] > 0.01 and broken["gptq-int4"] > 0.01, broken
    assert set(map(tuple, json.loads(made.stdout.splitlines()[-1]).values())) == {(0, 0)}  # torchao's
