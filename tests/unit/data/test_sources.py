"""Every source of text, and every way in which it can be unusable."""

from __future__ import annotations

import json
import os
import shutil

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sparseforge_ds.data.hub_text import HubText
from sparseforge_ds.data.mixture import find_source
from sparseforge_ds.data.text_files import TextOptions
from sparseforge_ds.evaluate.scored_text import iter_texts

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
    documents = find_source(str(files / name))
    assert list(documents.read()) == TEXTS
    assert list(documents.read()) == TEXTS, "a source can be read again"
    assert not documents.streamed


def test_a_text_file_is_one_document_and_a_folder_is_all_its_files(files):
    assert list(find_source(str(files / "a.txt")).read()) == ["\n".join(TEXTS)]
    assert list(find_source(str(files)).read()) == ["\n".join(TEXTS), *TEXTS * 4]


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    assert list(find_source(str(tmp_path / "saved")).read()) == TEXTS


@pytest.mark.parametrize("stream", ["", "stream:"])
def test_identity_is_content_wherever_it_lies_and_whenever_it_was_written(files, tmp_path_factory, stream):
    def identity(folder=files, **options):
        return find_source(f"{stream}{folder}", TextOptions(**options)).identity

    first = identity()
    for path in files.iterdir():
        os.utime(path, (1, 1))
    moved = tmp_path_factory.mktemp("other") / "place"
    shutil.copytree(files, moved)
    assert identity() == identity(moved) == first
    assert identity(sample_by="line") != first
    (files / "b.jsonl").write_text(json.dumps({"text": "other"}))
    assert identity() != first == identity(moved)
    (moved / "z.txt").write_text("one more")
    assert identity(moved) != first


def test_a_file_that_is_tokenized_before_may_be_renamed_but_not_change_its_size_unseen(files):
    path = files / "b.jsonl"
    first = find_source(str(path)).identity
    renamed = path.rename(files / "renamed.jsonl")
    assert find_source(str(renamed)).identity == first
    renamed.write_text(renamed.read_text().replace("one", "eno"))
    assert find_source(str(renamed)).identity != first
    assert find_source(str(files / "a.txt")).identity != first


def test_the_standard_library_is_a_source():
    documents = find_source("stdlib")
    assert list(documents.read()) == list(iter_texts("stdlib:train"))
    assert documents.identity == find_source("stdlib").identity
    with pytest.raises(ValueError, match="--split test: --dataset stdlib has train only"):
        find_source("stdlib", TextOptions(split="test"))


@pytest.mark.parametrize("dataset", ["./missing.jsonl", "/nowhere/at/all", "missing", "some/file.parquet", "a/b/c"])
def test_a_missing_file_is_named(dataset):
    with pytest.raises(ValueError, match="no such file or folder.*hub id"):
        find_source(dataset)


def test_a_hub_id_is_a_stream_that_is_looked_up_only_when_it_is_read():
    assert find_source("owner/name:config") == HubText("owner/name:config")


def test_files_are_a_stream_on_request(files):
    stream = find_source(f"stream:{files}")
    assert stream.streamed
    assert list(stream.read()) == ["\n".join(TEXTS), *TEXTS * 4]
    with pytest.raises(ValueError, match="no field 'body'"):
        find_source(f"stream:{files}", TextOptions("body"))
    with pytest.raises(ValueError, match="--dataset stream:owner/name: no such file or folder"):
        find_source("stream:owner/name")


@pytest.mark.parametrize("name", ["c.parquet", "d.arrow", "e.arrow"])
def test_a_missing_column_is_named_before_anything_is_read(files, name):
    with pytest.raises(ValueError, match="no field 'body'.*--text_field.*there are: n, text"):
        find_source(str(files / name), TextOptions("body"))


def test_a_bad_line_far_down_names_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 8 + '{"text": null}\n{"text": 3}\n')
    documents = find_source(str(path))
    with pytest.raises(ValueError, match="line 10: field 'text' is int"):
        list(documents.read())


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no file of .txt, .jsonl"):
        find_source(str(tmp_path))
