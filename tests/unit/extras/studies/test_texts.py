from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparseforge_ds.extras.studies.settings import CompareConfig, read_comparison
from sparseforge_ds.extras.studies.texts import read_texts
from tests.unit.extras.studies.test_settings import write


def config_of(folder: Path, validation: list[int | None], test: list[int | None], train: list[str]) -> CompareConfig:
    heldout, training = folder / "heldout.jsonl", folder / "train.jsonl"
    heldout.write_text("".join(json.dumps({"text": f"story {i}"}) + "\n" for i in range(6)))
    training.write_text("".join(json.dumps({"text": text}) + "\n" for text in train))
    changes = {"train_text": str(training)}
    for name, span in (("validation_text", validation), ("test_text", test)):
        changes[name] = {"path": str(heldout), "documents": span}
    return read_comparison(write(folder, **changes))


def test_parts_of_a_file_are_texts_of_their_own(tmp_path: Path) -> None:
    texts = read_texts(config_of(tmp_path, [1, 3], [3, None], ["other"]))
    assert texts.validation == ["story 1", "story 2"] and texts.test == ["story 3", "story 4", "story 5"]
    assert not texts.notes
    assert texts.identity != read_texts(config_of(tmp_path, [1, 3], [4, None], ["other"])).identity


def test_nothing_is_in_two_texts_unsaid(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="have 1 documents in common, first 'story 2'"):
        read_texts(config_of(tmp_path, [0, 3], [2, 4], ["other"]))
    texts = read_texts(config_of(tmp_path, [0, 3], [3, None], ["story 4", "other", "story 5"]))
    assert texts.notes == ["2 of 3 documents of the test text are in the training text too."]
    packed = tmp_path / "train.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "train.jsonl").read_bytes()))
    of_packed = replace(config_of(tmp_path, [0, 3], [3, None], ["other"]), train_text=str(packed))
    assert read_texts(of_packed).notes == texts.notes
    of_hub = replace(of_packed, train_text="allenai/c4:en")
    assert read_texts(of_hub).notes == ["Whether allenai/c4:en contains held-out documents was not checked."]


def test_documents_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="documents 3 to 9: there are 6"):
        read_texts(config_of(tmp_path, [0, 3], [3, 9], ["other"]))
    with pytest.raises(ValueError, match="documents 7 to None: there are 6"):
        read_texts(config_of(tmp_path, [0, 3], [7, None], ["other"]))


def test_blank_records_do_not_count(tmp_path: Path) -> None:
    config = config_of(tmp_path, [0, 3], [3, None], ["story 1"])
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps({"text": " "}) + "\n" + heldout.read_text())
    texts = read_texts(config)
    assert texts.validation == ["story 0", "story 1", "story 2"] and texts.test == ["story 3", "story 4", "story 5"]


def test_a_training_text_may_have_conversations(tmp_path: Path) -> None:
    config = config_of(tmp_path, [0, 3], [3, None], ["story 1"])
    turns = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "story 2"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(turns) + "\n")
    assert read_texts(config).notes == []


def test_the_embedded_training_text_is_compared_too(tmp_path: Path) -> None:
    parts = {
        f"{name}_text": {"path": f"stdlib:{part}", "documents": [0, 2]}
        for name, part in (("validation", "train"), ("test", "heldout"))
    }
    config = read_comparison(write(tmp_path, train_text="stdlib", **parts))
    assert read_texts(config).notes == ["2 of 2 documents of the validation text are in the training text too."]
