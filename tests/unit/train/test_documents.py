"""Every source of text, and every way in which it can be unusable."""

from __future__ import annotations

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sparseforge_ds.train.documents import Documents, find_documents
from sparseforge_ds.train.hub import HubStream
from sparseforge_ds.train.text_files import FileStream

TEXTS = ["one", "two\nlines", "tr\N{LATIN SMALL LETTER E WITH ACUTE}s"]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps({"text": text, "n": 1}) for text in TEXTS))
    table = pyarrow.table({"n": [1, 2, 3], "text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "d.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_stream(str(tmp_path / "e.arrow"), table.schema) as writer:
        writer.write_table(table)
    return tmp_path


@pytest.mark.parametrize("name", ["b.jsonl", "c.parquet", "d.arrow", "e.arrow"])
def test_records_are_documents(files, name):
    documents = find_documents(str(files / name), "text")
    assert list(documents) == TEXTS
    assert list(documents) == TEXTS, "a source can be read again"
    assert isinstance(documents, Documents)


def test_a_text_file_is_one_document_and_a_folder_is_all_its_files(files):
    assert list(find_documents(str(files / "a.txt"), "text")) == ["\n".join(TEXTS)]
    assert list(find_documents(str(files), "text")) == ["\n".join(TEXTS), *TEXTS * 4]


def test_a_folder_that_datasets_saved(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    assert list(find_documents(str(tmp_path / "saved"), "text")) == TEXTS


def test_identity_follows_content_and_field(files):
    path = files / "b.jsonl"
    first = find_documents(str(path), "text").identity
    assert first == find_documents(str(path), "text").identity
    path.write_text(json.dumps({"text": "other"}))
    assert first != find_documents(str(path), "text").identity


def test_the_standard_library_is_a_source():
    documents = find_documents("stdlib", "text")
    assert sum(map(len, documents)) > 500_000
    assert documents.identity == find_documents("stdlib", "text").identity


@pytest.mark.parametrize("dataset", ["./missing.jsonl", "/nowhere/at/all", "missing", "some/file.parquet", "a/b/c"])
def test_a_missing_file_is_named(dataset):
    with pytest.raises(ValueError, match="no such file or folder.*hub id"):
        find_documents(dataset, "text")


def test_a_hub_id_is_a_stream_that_is_looked_up_only_when_it_is_read():
    assert find_documents("owner/name:config", "text") == HubStream("owner/name:config", "text")


def test_files_are_a_stream_on_request(files):
    stream = find_documents(f"stream:{files}", "text")
    assert isinstance(stream, FileStream)
    assert list(stream.read()) == ["\n".join(TEXTS), *TEXTS * 4]
    assert stream.identity != find_documents(str(files), "text").identity
    with pytest.raises(ValueError, match="no field 'body'"):
        find_documents(f"stream:{files}", "body")
    with pytest.raises(ValueError, match="--dataset stream:owner/name: no such file or folder"):
        find_documents("stream:owner/name", "text")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl, line 1: no field 'text'.*--text_field.*body"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: field 'text' is int, not text"),
        ("a.jsonl", b'{"text": "x"\n', "line 1: not JSON"),
        ("a.jsonl", b'["text"]\n', "line 1: not an object"),
        ("a.jsonl", b"\xff\xfe\n", "not readable"),
        ("a.txt", b"\xff\xfe", "not readable"),
        ("a.parquet", b"PAR1 is not enough", "not a readable .parquet file"),
        ("a.arrow", b"nothing of the kind", "not a readable .arrow file"),
        ("a.csv", b"text\nx\n", "unknown kind of file '.csv'"),
    ],
)
def test_an_unusable_file_says_why(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(find_documents(str(path), "text"))


@pytest.mark.parametrize("name", ["c.parquet", "d.arrow", "e.arrow"])
def test_a_missing_column_is_named_before_anything_is_read(files, name):
    with pytest.raises(ValueError, match="no field 'body'.*--text_field.*there are: n, text"):
        find_documents(str(files / name), "body")


def test_a_bad_line_far_down_names_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 9 + '{"text": null}\n')
    documents = find_documents(str(path), "text")
    with pytest.raises(ValueError, match="line 10: field 'text' is NoneType"):
        list(documents)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no .txt, .jsonl"):
        find_documents(str(tmp_path), "text")
