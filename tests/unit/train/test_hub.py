"""Streams of `datasets`, on folders in the schema of C4 that it streams as it streams the hub."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest

from sparseforge_ds.train.hub import HubStream


@pytest.fixture
def c4(tmp_path):
    """Three shards of unequal length, as allenai/c4 has them."""
    for shard, length in enumerate((7, 1, 12)):
        lines = [
            {"text": f"{shard} {i}", "timestamp": "2019-04-25T12:57:54Z", "url": "http://x"} for i in range(length)
        ]
        with gzip.open(tmp_path / f"c4-train.{shard:05d}-of-00003.json.gz", "wt") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return HubStream(str(tmp_path), "text")


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


def test_a_missing_field_names_the_row(c4):
    with pytest.raises(ValueError, match="row 0: no field 'body'.*there are: text, timestamp, url"):
        next(HubStream(c4.name, "body").read())


def test_a_shard_that_breaks_off_names_the_row(c4, tmp_path):
    path = tmp_path / "c4-train.00002-of-00003.json.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"row 8: cannot be read any further.*--resume"):
        list(c4.read())


def test_a_run_stays_at_the_revision_that_it_began_with(c4, monkeypatch):
    """The hub's dataset may be replaced while a run goes on."""
    newest, asked = ["first"], []
    load = datasets.load_dataset

    def load_dataset(name, config, *, split, streaming, revision):
        asked.append((name, config, revision))
        return load(c4.name, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda _, name: SimpleNamespace(sha=newest[0]))
    reader = HubStream("allenai/c4:en", "text").read()
    next(reader)
    state = json.loads(json.dumps(reader.state()))
    newest[0] = "second"
    HubStream("allenai/c4:en", "text").read(state).rewind()
    HubStream("allenai/c4:en", "text").read()
    assert asked == [("allenai/c4", "en", "first")] * 3 + [("allenai/c4", "en", "second")]


def test_a_dataset_that_cannot_be_had_says_so(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="--dataset owner/name: neither a local file or folder nor a readable hub"):
        HubStream("owner/name", "text").read()
