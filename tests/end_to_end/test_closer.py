"""The commands of docs/guides/closer.md, with its block, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparseforge_ds.cli.main import main
from tests.end_to_end.test_rotate import rotated
from tests.end_to_end.test_train import ROOT, flags_of, train
from tests.tiny_folders import deepspeed_json

PAGE = (ROOT / "docs" / "guides" / "closer.md").read_text()


def test_everything_that_brings_a_model_closer_goes_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    assert "--deepspeed closer.json" in PAGE
    out = tmp_path / "permuted"
    run = tmp_path / "run"
    assert main(["permute", str(rotated(tmp_path, "llama")), str(out)]) == 0
    capfd.readouterr()
    train(*flags_of(tmp_path, deepspeed_json(3, max_steps=10, **json.loads(block)), model=out))
    output = capfd.readouterr().out
    for line in ("low rank   a learned branch", "teacher    "):
        assert f"\n  {line}" in output
    assert json.loads((run / "result.json").read_text())["last_step"]["loss/hidden"] > 0
    text = str(tmp_path / "text.jsonl")
    folders = [str(tmp_path / "2to4"), str(tmp_path / "packed24")]
    assert main(["consolidate", str(run), folders[0]]) == 0
    assert main(["export", str(run), folders[1], "--format", "packed24"]) == 0
    assert main(["verify", *folders[:1]]) == 0
    results = []
    for folder in folders:
        report = tmp_path / "report.json"
        assert main(["evaluate", folder, "--text", text, "--seq_length", "32", "--json", str(report)]) == 0
        results.append(json.loads(report.read_text())["perplexity"]["perplexity"])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
