"""The first windows of a text, without the rest of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate import calibration as module
from sparseforge_ds.evaluate.calibration import calibration_windows
from sparseforge_ds.evaluate.finished_model import load_tokenizer
from sparseforge_ds.evaluate.perplexity import windows
from sparseforge_ds.evaluate.scored_text import read_documents

CONFIG = LlamaConfig(max_position_embeddings=512)


@pytest.fixture(params=["stories260K", "stdlib_llama"])
def model(request: pytest.FixtureRequest, assets: Path) -> str:
    """Return a tokenizer of sentencepiece, and one by bytes."""
    own = Path(module.__file__).parents[1] / "assets" / "stdlib_llama"
    return str(own if request.param == "stdlib_llama" else assets / "models" / request.param)


@pytest.mark.parametrize(("sequences", "seq_length"), [(1, 7), (4, 64), (64, 32), (3, None)])
def test_windows_are_those_of_the_whole_text(model: str, sequences: int, seq_length: int | None, assets: Path) -> None:
    text = str(assets / "text" / "tinystories" / "heldout.jsonl")
    batches = calibration_windows(model, CONFIG, text, sequences, seq_length)
    length = 512 if seq_length is None else seq_length
    wanted, _ = windows(load_tokenizer(model), read_documents(text, limit=2000), length, length)
    assert [batch.tolist() for batch in batches] == [[passage.tokens] for passage in wanted[:sequences]]


def test_no_more_text_is_read_than_the_windows_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": "a story \ud83d of a fox " * 20}) + "\n" for _ in range(1000)))
    read = []
    iter_texts = module.iter_texts
    monkeypatch.setattr(
        module, "iter_texts", lambda text, _field: (read.append(0) or document for document in iter_texts(text))
    )
    model = str(Path(module.__file__).parents[1] / "assets" / "stdlib_llama")
    batches = calibration_windows(model, CONFIG, str(path), 2, 128)
    assert torch.cat(batches).shape == (2, 128) and len(read) < 20


def test_tokens_that_the_model_does_not_know_are_refused(model: str, assets: Path) -> None:
    text = str(assets / "text" / "tinystories" / "heldout.jsonl")
    with pytest.raises(ValueError, match=f"{model}: its tokenizer gives token .*, the model has 90 embeddings"):
        calibration_windows(model, LlamaConfig(vocab_size=90), text, 4, 64)


def test_a_short_text_gives_fewer_windows(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    model = str(Path(module.__file__).parents[1] / "assets" / "stdlib_llama")
    path.write_text("one two three four five six seven eight nine ten")
    assert len(calibration_windows(model, CONFIG, str(path), 64, 2)) < 64
    with pytest.raises(ValueError, match="less than one window of 500; give a longer text or"):
        calibration_windows(model, CONFIG, str(path), 64, 500)
    path.write_text(" \n")
    with pytest.raises(ValueError, match="there is no text in it"):
        calibration_windows(model, CONFIG, str(path), 64, 2)


def test_flags_of_a_text_need_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["permute", str(tmp_path), str(tmp_path / "out"), "--sequences", "8"]) == 2
    assert "--sequences 8: it belongs to --text" in capsys.readouterr().err


def test_the_field_of_a_record_that_holds_the_text_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"content": "one two three four five six"}) + "\n")
    model = str(Path(module.__file__).parents[1] / "assets" / "stdlib_llama")
    assert calibration_windows(model, CONFIG, str(path), 1, 4, "content")[0].shape == (1, 4)
