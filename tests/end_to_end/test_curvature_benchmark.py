"""benchmarks/curvature.py by its arguments, at a size that only shows that every number is there."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from benchmarks.curvature import main
from tests.distributed import run_distributed
from tests.tiny_folders import BYTE_VOCABULARY, write_model, write_text
from tests.tiny_models import tiny_llama

SIZE = ["--seq=16", "--batch=2", "--batches=2", "--heldout_windows=4", "--reference_probes=40", "--refreshes=2"]


def arguments_of(folder: Path) -> list[str]:
    texts = ["--text", str(folder / "text.jsonl"), "--heldout", str(folder / "heldout.jsonl")]
    return [str(folder / "study"), "--model", str(folder / "model"), *texts, *SIZE]


def study(folder: Path, *only: str) -> str:
    """Run the benchmark in a process of its own, and return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*arguments_of(folder), "--only", *only]) == 0
    return printed.getvalue()


def test_every_number_is_there_and_a_second_call_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=BYTE_VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=1)
    write_model(tmp_path / "model", model)
    write_text(tmp_path / "text.jsonl")
    write_text(tmp_path / "heldout.jsonl", documents=8)
    run_distributed(study, 1, tmp_path, "outputs, radius 0.1", "weights, exact, one kind")
    # A second call, with one estimate more, measures neither the reference nor the others again.
    time_of_reference = (tmp_path / "study" / "reference.pt").stat().st_mtime_ns
    rows = json.loads((tmp_path / "study" / "curvature.json").read_text())["rows"]

    (printed,) = run_distributed(study, 1, tmp_path, "outputs, radius 0.1", "fisher, per token")
    report = json.loads((tmp_path / "study" / "curvature.json").read_text())
    assert (tmp_path / "study" / "reference.pt").stat().st_mtime_ns == time_of_reference
    assert report["rows"][: len(rows)] == rows
    estimates = {(row["estimate"], row["refreshes"], row["average"], row["form"]) for row in report["rows"]}
    # Estimates are there at every number of refreshes, and in every form.
    outputs = {("outputs, radius 0.1", *rest) for rest in ((1, "mean"), (2, "mean"), (2, "running mean"))}
    assert {row[:3] for row in estimates if row[0] == "outputs, radius 0.1"} == outputs
    assert ("outputs, radius 0.1, bf16", 2, "mean", "factored") in estimates
    assert {row[1:3] for row in estimates if "one kind" in row[0]} == {(7, "mean")}  # seven kinds of layers, each once
    assert {row[3] for row in estimates if "one kind" in row[0]} == {"elements", "shrunk", "factored"}
    # Numbers are where such numbers lie.
    for row in report["rows"]:
        assert -1 <= row["correlation"] <= 1 and 0 <= row["same_survivors"] <= 1
        assert row["perplexity"] > 1 and row["cost_in_steps"] > 0
    assert report["reference"]["correlation"] == report["reference"]["same_survivors"] == 1
    assert -1 < report["reference"]["agreement_of_halves"] < 1
    table = (tmp_path / "study" / "curvature.md").read_text()
    assert table in printed and "| fisher, per token, bf16 | 2 | running mean | elements |" in table

    # Other settings would not compare, and are refused.
    with pytest.raises(ValueError, match="measured with other settings"):
        main([*arguments_of(tmp_path), "--seq=8"])
