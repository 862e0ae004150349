"""Datasets of the hub, on folders in the layouts of C4 and Dolmino, whose files are found as those of the hub are."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import datasets
import fsspec
import huggingface_hub
import pytest

from sparseforge_ds.data import text_formats
from sparseforge_ds.data.hub_text import HubText
from sparseforge_ds.data.mixture import find_source
from sparseforge_ds.data.text_files import TextOptions
from sparseforge_ds.data.text_formats import iter_documents
from tests.distributed import PATIENCE, ROOT
from tests.hub_folders import write_c4, write_dolmino
from tests.pretend_hub import REVISION, pretend_hub


@pytest.fixture
def c4(tmp_path):
    """Three shards of unequal length, and a validation split that is not to be read."""
    write_c4(tmp_path, (7, 1, 12))
    return HubText(f"{tmp_path}:en")


def test_a_reader_continues_from_every_document(c4):
    everything = list(c4.read())
    assert len(everything) == 20 and everything[6:9] == ["0 6", "1 0", "2 0"]
    reader = c4.read()
    for i in range(21):
        state = json.loads(json.dumps(reader.state()))
        again = c4.read(state)
        assert json.loads(json.dumps(again.state())) == state
        assert list(again) == everything[i:]
        again.rewind()
        assert list(again) == everything
        assert next(reader, None) == (everything[i] if i < 20 else None)
    assert list(c4.read(reader.state())) == [], "at the end it stays at the end"


def test_a_missing_field_names_the_line(c4):
    with pytest.raises(ValueError, match=r"00000-of-00003.json.gz, line 1: no field 'body'.*text, timestamp, url"):
        next(HubText(c4.name, TextOptions("body")).read())


def test_a_shard_that_breaks_off_is_named(c4, tmp_path):
    path = tmp_path / "en" / "c4-train.00002-of-00003.json.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"00002-of-00003.json.gz(, after \d+ documents)?: not readable"):
        list(c4.read())


@pytest.mark.parametrize(
    ("part", "count"), [("", 27), ("dclm", 4), ("math", 9), ("data/math", 9), ("data/math/gsm8k", 3), ("flan", 6)]
)
def test_shards_of_every_schema_and_compression_are_read(tmp_path, part, count):
    """Shards of one folder differ in their columns and in the types of a column; `datasets` refuses to cast those."""
    expected = write_dolmino(tmp_path)
    folder = part if part.startswith("data") or not part else f"data/{part}"
    wanted = [text for path, texts in sorted(expected.items()) if path.startswith(folder) for text in texts]
    assert list(HubText(f"{tmp_path}:{part}".rstrip(":")).read()) == wanted
    assert len(wanted) == count
    if part:
        assert list(find_source(f"stream:{tmp_path}/{folder}").read()) == wanted
        assert list(find_source(f"{tmp_path}/{folder}").read()) == wanted


def test_reading_by_datasets_itself_would_fail(tmp_path):
    """Show why records are parsed here: if this test fails, hub.py and text_formats.py can become simpler."""
    write_dolmino(tmp_path)
    with pytest.raises((datasets.exceptions.DatasetsError, ValueError, TypeError, OSError)):
        list(datasets.load_dataset(str(tmp_path), "math", split="train", streaming=True))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("none", "neither a local file.*none"),
        ("data/none", "neither a local file|no split train"),
        ("held_out", r"has no split train \(there are: test\)"),
        ("tables", r"t\.pdf is none of \.txt, .*owner/name:folder/subfolder"),
    ],
)
def test_an_unreadable_file_says_so(tmp_path, part, message):
    write_dolmino(tmp_path)
    with pytest.raises(ValueError, match=message):
        HubText(f"{tmp_path}:{part}").read()


def test_other_splits_are_read_on_request_and_a_folder_is_read_by_them_too(c4, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    validation = ["validation 0", "validation 1"]
    assert list(HubText(c4.name, TextOptions(split="validation")).read()) == validation
    assert "1 file of split validation: " in caplog.text
    assert sorted(HubText(c4.name, TextOptions(split="train+validation")).read()) == sorted([*c4.read(), *validation])
    assert HubText(c4.name, TextOptions(split="validation")).identity != c4.identity
    (tmp_path / "en").rename(tmp_path / "sub")
    (tmp_path / "en").mkdir()
    (tmp_path / "sub").rename(tmp_path / "en" / "sub")
    folder = f"{tmp_path}:en/sub"
    assert list(HubText(folder).read())[0] == "0 0" and len(list(HubText(folder).read())) == 20
    assert list(HubText(folder, TextOptions(split="validation")).read()) == validation


def test_files_behind_an_address_are_opened_by_fsspec(tmp_path):
    expected = write_dolmino(tmp_path)
    memory = fsspec.filesystem("memory")
    for path, texts in expected.items():
        memory.pipe_file(f"/dolmino/{path}", (tmp_path / path).read_bytes())
        assert list(iter_documents(f"memory://dolmino/{path}", "text")) == texts


def test_a_network_that_fails_now_and_then_loses_no_document(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    waited = []
    attempts = []
    monkeypatch.setattr(text_formats.time, "sleep", waited.append)

    def flaky(file, *_):
        attempts.append(file)
        for i in range(10):
            if i == 2 * len(attempts):
                raise huggingface_hub.errors.HTTPError("reset")
            yield f"{i}"

    # Every attempt gets two documents further; none is lost or given twice.
    monkeypatch.setattr(text_formats, "iter_documents_once", flaky)
    assert list(iter_documents("hf://x", "text")) == [str(i) for i in range(10)]
    assert len(attempts) == 5 and waited == [1.0] * 4, "it was readable again each time"
    assert caplog.text.count("trying again") == 4

    def dead(*_):
        yield "0"
        raise OSError("no route")

    # A network that stays away is given up, after all waits of the list.
    waited.clear()
    monkeypatch.setattr(text_formats, "iter_documents_once", dead)
    with pytest.raises(ValueError, match=r"hf://x, after 1 documents: not readable \(no route\).*--resume"):
        list(iter_documents("hf://x", "text"))
    assert waited == list(text_formats.RETRY_SECONDS)


@pytest.mark.parametrize("error", [FileNotFoundError, gzip.BadGzipFile, EOFError])
def test_a_file_that_is_gone_or_damaged_is_not_waited_for(monkeypatch, error):
    monkeypatch.setattr(
        text_formats.time, "sleep", lambda seconds: pytest.fail("waited for a file that will not get better")
    )

    def gone(file, *_):
        yield "0"
        raise error(file)

    monkeypatch.setattr(text_formats, "iter_documents_once", gone)
    with pytest.raises(ValueError, match="hf://x, after 1 documents: not readable"):
        list(iter_documents("hf://x", "text"))


def test_a_run_stays_at_the_revision_that_it_began_with(c4, monkeypatch):
    """Replace the hub's dataset while a run goes on."""
    newest = ["first"]
    asked = []
    load = datasets.load_dataset_builder

    def load_dataset_builder(path, name, *, revision):
        asked.append((path, name, revision))
        return load(c4.name.rpartition(":")[0], name)

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda _, name: SimpleNamespace(sha=newest[0]))
    reader = HubText("allenai/c4:en").read()
    next(reader)
    state = json.loads(json.dumps(reader.state()))
    newest[0] = "second"
    HubText("allenai/c4:en").read(state).rewind()
    HubText("allenai/c4:en").read()
    assert asked == [("allenai/c4", "en", "first")] * 2 + [("allenai/c4", "en", "second")]


def test_a_card_that_names_files_of_this_machine_is_refused_before_anybody_looks(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: en, data_files: '/**'}]\n---\n")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "README.md"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: pytest.fail("it looked"))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda _, name: SimpleNamespace(sha="first"))
    with pytest.raises(ValueError, match=r"--dataset allenai/c4:en: its README\.md .* names '/\*\*', outside of the"):
        HubText("allenai/c4:en").read()


def test_a_dataset_that_cannot_be_had_says_so(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="--dataset owner/name: neither a local file or folder nor a readable hub"):
        HubText("owner/name").read()


CLIENT = """
import json, sys
from sparseforge_ds.data.hub_text import HubText
name = "allenai/dolmino-mix-1124"
parts = {part: list(HubText(f"{name}:{part}").read()) for part in ("math", "dclm", "data/math/gsm8k")}
reader = HubText(name).read()
begun = [next(reader) for _ in range(13)]
again = HubText(name).read(json.loads(json.dumps(reader.state())))
print(json.dumps({"parts": parts, "all": [*begun, *again], "rest": list(reader), "state": reader.state()}))
"""


def test_the_hub_itself_as_far_as_it_can_be_had_without_a_network(tmp_path):
    """Send real requests to a server on this machine that answers as the hub does and loses a connection."""
    expected = write_dolmino(tmp_path / "dataset")
    everything = [text for _, texts in sorted(expected.items()) for text in texts]
    lost = "data/math/gsm8k/v0/train.jsonl"
    with pretend_hub(tmp_path / "dataset", "allenai/dolmino-mix-1124", breaks_off=lost) as (address, sent):
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        client = subprocess.run(
            [sys.executable, "-c", CLIENT],
            cwd=ROOT,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert client.returncode == 0, client.stderr
    answer = json.loads(client.stdout.splitlines()[-1])
    for part, texts in answer["parts"].items():
        folder = part if part.startswith("data") else f"data/{part}"
        assert texts == [text for path, own in sorted(expected.items()) if path.startswith(folder) for text in own]
    assert answer["all"] == everything and answer["rest"] == everything[13:]
    assert answer["state"]["revision"] == REVISION
    assert sent.count(lost) == 5, "four readers, and one asked again"
    assert not any("held_out" in path for path in sent)
