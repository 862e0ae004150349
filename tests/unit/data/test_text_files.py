"""Local files: compressed lines, and readers that continue from any document."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from sparseforge_ds.data.splits import find_files
from sparseforge_ds.data.text_files import LocalText, TextOptions
from sparseforge_ds.data.text_formats import iter_documents
from tests.hub_folders import zstd

TEXTS = [f"text {i}" for i in range(5)]
LINES = "".join(json.dumps({"text": text, "timestamp": "2019-04-25", "url": "http://x"}) + "\n" for text in TEXTS)


@pytest.fixture
def folder(tmp_path):
    """Files as C4, Dolmino and others have them, five documents in each but the last, which is one."""
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(LINES.encode()))
    (tmp_path / "c.jsonl").write_text(LINES)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "d.parquet")
    (tmp_path / "e.jsonl").write_text("")
    (tmp_path / "f.txt").write_text("all of it\nis one")
    (tmp_path / "dataset_info.json").write_text("{}")
    return tmp_path


def stream(folder):
    return LocalText("stream:x", find_files(folder))


@pytest.mark.parametrize("suffix", ["jsonl.gz", "json.gz", "jsonl.zst", "json.zst"])
def test_compressed_lines_are_documents(tmp_path, suffix):
    ensure_token_cache = gzip.compress if suffix.endswith("gz") else zstd
    path = tmp_path / f"part.{suffix}"
    path.write_bytes(ensure_token_cache(LINES.encode()) + ensure_token_cache(LINES.encode()))
    assert find_files(tmp_path).paths == (path,)
    assert list(iter_documents(str(path), "text")) == TEXTS * 2, "files that were put one behind the other are one"


def test_a_reader_continues_from_every_document(folder):
    everything = list(stream(folder).read())
    assert everything == [*TEXTS * 4, "all of it\nis one"]
    reader = stream(folder).read()
    for i in range(len(everything) + 1):
        state = json.loads(json.dumps(reader.state()))
        again = stream(folder).read(state)
        assert list(again) == everything[i:]
        again.rewind()
        assert list(again) == everything
        assert next(reader, None) == (everything[i] if i < len(everything) else None)


def test_identity_follows_files_and_field(folder):
    before = stream(folder).identity
    assert before == stream(folder).identity
    assert before != LocalText("stream:x", find_files(folder), TextOptions("body")).identity
    (folder / "c.jsonl").write_text("")
    assert before != stream(folder).identity
