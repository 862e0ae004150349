"""`sparseforge evaluate`: what it refuses. What it measures is in tests/unit/evaluate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate import finished_model
from sparseforge_ds.evaluate.scored_text import read_text
from sparseforge_ds.export.formats import export
from tests.sparse_folders import MODELS, ModelSource
from tests.tiny_folders import BYTE_VOCABULARY, write_model


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--one_shot", "4:8"],
            "model.layers.0.mlp.down_proj.weight (and 4 more) of shape (64, 172) cannot be 4:8: its input axis has 172 "
            "elements, not a multiple of 8; choose another pattern, or make a model that keeps such weights dense by "
            "sparseforge prune, and evaluate that",
        ),
        (["--text_field", "body"], "--text_field body: no --text has records, whose field it could name; leave it out"),
    ],
)
def test_what_a_flag_cannot_do_is_said_before_a_model_is_loaded(
    flags: list[str],
    message: str,
    stories: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "text.txt").write_text("Once upon a time. " * 200)
    assert main(["evaluate", stories, "--text", str(tmp_path / "text.txt"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and "exclude" not in error


def test_a_packed_model_is_not_pruned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("a model was loaded"))
    dense = write_model(tmp_path / "dense", MODELS["llama"](vocab_size=BYTE_VOCABULARY))
    packed = str(tmp_path / "packed")
    source = ModelSource(MODELS["llama"](vocab_size=BYTE_VOCABULARY), dense, torch.float32)
    export(source, packed, "packed24", skip_proof=True)
    assert main(["evaluate", packed, "--text", "stdlib:heldout", "--one_shot", "2:4", "--seq_length", "8"]) == 2
    assert f"--one_shot 2:4: {packed} is packed, and 2:4 already; leave --one_shot out" in capsys.readouterr().err


def test_the_field_of_rows_of_wikitext_can_be_named(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "a"}\n{"body": "b"}\n')
    assert read_text(f"wikitext2:{rows}", "body", None) == ["a\n\nb"]
    assert main(["evaluate", str(stories), "--text", f"wikitext2:{rows}", "--text_field", "nosuch"]) == 2
    assert f"--text wikitext2:{rows}: its rows have no column 'nosuch' (body)" in capsys.readouterr().err
