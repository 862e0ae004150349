"""`sparseforge evaluate`: what it refuses. What it measures is in tests/unit/evaluate."""

from __future__ import annotations

import pytest

from sparseforge_ds.cli.main import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to measure: give --text for perplexity, --tasks or --suite for accuracy, or both"),
        (["--tasks", "piqa", "--stride", "8"], "--stride 8: it belongs to perplexity; give --text, or leave it out"),
        (["--tasks", "piqa", "--text_field", "text"], "--text_field text: it belongs to perplexity; give --text"),
        (["--tasks", "piqa", "--stride", "0"], "--stride 0: it belongs to perplexity; give --text, or leave it out"),
        (["--text", "stdlib:heldout", "--paper", "llama2-7b"], "--paper llama2-7b: it belongs to accuracy; give"),
        (["--txet", "stdlib:heldout"], "--txet: unknown flag; did you mean --text?"),
        (["--text", "stdlib:heldout", "--tasks", " , "], "--tasks ' , ': name at least one task"),
        (["stray", "--tasks", "piqa"], "'stray' belongs to no flag; quote a value that has spaces"),
        (["--text", "stdlib:heldout", "--json", "."], "--json .: is a folder; give a file"),
        (["--text", "stdlib:heldout", "--batch_size", "0"], "--batch_size 0: use an integer >= 1"),
        (["--text", "stdlib:heldout", "--seq_length", "1"], "--seq_length 1: use an integer >= 2"),
        (["--text", "stdlib:heldout", "--stride", "0"], "--stride 0: use an integer >= 1"),
        (
            ["--text", "stdlib:heldout"],
            "no/model: no such folder, and no model that can be had from the hub (it is not in the cache, and HF_HUB_",
        ),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["evaluate", "no/model", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_several_processes_measure_texts_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave the message to the first rank."""
    monkeypatch.setenv("RANK", "1")
    assert main(["evaluate", "no/model", "--text", "no such file"]) == 2
    assert capsys.readouterr().err == ""
