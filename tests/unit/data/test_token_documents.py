"""Texts that are token ids already: parquet, arrow and JSON records, and Megatron-LM's files."""

import json
import struct

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sparseforge_ds.data.mixture import find_source
from sparseforge_ds.data.producer import ChunkWriter
from sparseforge_ds.data.text_files import TextOptions
from sparseforge_ds.data.text_formats import iter_documents
from sparseforge_ds.data.token_cache import ensure_token_cache
from sparseforge_ds.data.windows import document_starts, ids_of_tokens, trained_flags
from tests.tiny_folders import byte_tokenizer
from tests.tiny_streams import chunk_spec
from tests.token_files import write_megatron

IDS = [[256, 1, 2, 257], [256, 3], [], [256, *range(50, 90)]]


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def cached(source, tmp_path, **options):
    return ensure_token_cache(find_source(str(source), TextOptions(**options)), byte_tokenizer(), tmp_path / "data")


def write_kinds(folder):
    """Write the same documents in every kind of file."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
    datasets.Dataset.from_dict({"input_ids": IDS}).save_to_disk(folder / "saved")
    padded = [[0, 0, *ids, 0] for ids in IDS]
    masks = [[0, 0, *[1] * len(ids), 0] for ids in IDS]
    return [
        folder / "a.jsonl",
        folder / "saved",
        write_parquet(folder / "a.parquet", input_ids=IDS, other=[{"x": 1}] * len(IDS)),
        write_parquet(folder / "padded.parquet", input_ids=padded, attention_mask=masks),
        write_megatron(folder / "a", [[ids] for ids in IDS]),
        write_megatron(folder / "cut", [[ids[:1], ids[1:]] for ids in IDS], "int32"),
    ]


def test_ids_of_every_kind_of_file_are_taken_as_they_are(tmp_path):
    for path in write_kinds(tmp_path):
        cache = cached(path, tmp_path)
        assert cache.open().tolist() == sum(IDS, []), path
        assert (cache.documents, cache.skipped, cache.largest_id) == (3, 1, 257)
        marked = cached(path, tmp_path, document_attention=True).open()
        assert document_starts(marked).nonzero()[0].tolist() == [0, 4, 6], path


def test_labels_say_what_is_trained_on(tmp_path):
    labels = [[-100, -100, 2, 257], [256, 3], [], [-100] * 41]
    path = write_parquet(tmp_path / "a.parquet", input_ids=IDS, labels=labels)
    token = cached(path, tmp_path, loss_on="completion").open()
    assert ids_of_tokens(token).tolist() == sum(IDS, [])
    assert trained_flags(token).nonzero()[0].tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="row 0: its labels leave tokens out, .*use --loss_on completion"):
        find_source(str(path))
    with pytest.raises(ValueError, match="document 1: has token ids without labels, which --loss_on completion needs"):
        find_source(str(write_megatron(tmp_path / "b", [[[1]]])), TextOptions(loss_on="completion"))
    complete_labels = write_parquet(tmp_path / "whole.parquet", input_ids=IDS, labels=IDS)
    assert cached(complete_labels, tmp_path).open().tolist() == sum(IDS, [])


def test_a_text_is_read_where_there_are_both_unless_the_field_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=["a", "b"], input_ids=[[1], [2]])
    tokenizer = byte_tokenizer()
    expected = [256, *tokenizer("a")["input_ids"], 256, *tokenizer("b")["input_ids"]]
    assert cached(path, tmp_path).open().tolist() == expected
    assert cached(path, tmp_path, text_field="input_ids").open().tolist() == [1, 2]


def test_a_stream_of_ids_continues_from_any_chunk(tmp_path):
    path = write_megatron(tmp_path / "a", [[ids] for ids in IDS])
    row = []
    for chunk in range(4):
        writer = ChunkWriter(chunk_spec(find_source(f"stream:{path}"), tmp_path / "chunks"))
        assert writer.finished == chunk
        writer.write_next()
        row += writer.chunks.open(chunk).tolist()
    assert row == np.resize(sum(IDS, []), len(row)).tolist()


def test_the_content_of_both_files_of_megatron_is_the_identity(tmp_path):
    path = write_megatron(tmp_path / "a", [[[1, 2]]])
    source = find_source(str(path))
    assert source.files.describe() == f"a.idx, {path.stat().st_size + 4} bytes"
    write_megatron(tmp_path / "b", [[[1, 3]]])
    assert source.identity != find_source(str(tmp_path / "b.idx")).identity


def test_null_ids_are_an_empty_document_whatever_is_trained_on(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": null}\n{"input_ids": [1], "labels": [1]}\n')
    for loss_on in ("all", "completion"):
        assert [len(document) for document in iter_documents(str(path), "text", loss_on=loss_on)] == [0, 1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input_ids": [1, -5]}, "line 1: input_ids has -5, which is not from 0 to"),
        ({"input_ids": [1, 2**31]}, "line 1: input_ids has 2147483648, which is not from 0 to"),
        ({"input_ids": [1, 2**70]}, "line 1: input_ids is not a flat list of integers"),
        ({"input_ids": [1.0, 2.0]}, "line 1: input_ids is not a flat list of integers"),
        ({"input_ids": [True]}, "line 1: input_ids is not a flat list of integers"),
        ({"input_ids": [1, None]}, "line 1: input_ids is not a flat list of integers"),
        ({"input_ids": "12"}, "line 1: input_ids is not a flat list of integers"),
        ({"input_ids": [[1], [2]]}, "line 1: input_ids is not a flat list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "line 1: input_ids is not a flat list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "line 1: labels has 1 entries, and input_ids 2"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels are neither the ids of their tokens nor -100"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "labels are neither the ids of their tokens nor -100"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "attention_mask has 2, which is not from 0 to 1"),
    ],
)
def test_a_wrong_record_is_an_error_that_names_it(tmp_path, record, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=message):
        next(iter_documents(str(path), "text"))


def test_an_id_that_the_tokenizer_lacks_is_an_error_and_not_another_id(tmp_path):
    for wrong in (258, 2**16 + 1):
        path = write_megatron(tmp_path / "a", [[[1]], [[2, wrong]]], "int32")
        with pytest.raises(ValueError, match=f"document 2: has token {wrong}, and the tokenizer's ids end at 257"):
            cached(path, tmp_path)


def change(path, offset, form, value):
    content = bytearray(path.read_bytes())
    content[offset : offset + struct.calcsize(form)] = struct.pack(form, value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "<B", 0, "is no index of Megatron"),
        (9, "<Q", 2, "is an index of version 2"),
        (17, "<B", 7, r"holds no integers \(dtype code 7\)"),
        (17, "<B", 5, "the index puts 2 tokens at byte 0 of a.bin, which has 8"),
        (18, "<Q", 2**62, "and its header asks for"),
        (26, "<Q", 2**63, "and its header asks for"),
        (34, "<i", 2**31 - 1, "the index puts 2147483647 tokens at byte 0"),
        (34, "<i", -1, "the index puts -1 tokens at byte 0"),
        (42, "<q", -2, "tokens at byte -2 of a.bin"),
        (50, "<q", 2**62, "document 2: the index puts 2 tokens at byte 4,611,686,018,427,387,904"),
        (58, "<q", 1, "do not cover its 2 sequences"),
        (66, "<q", 7, "document 1: its bounds are 0 and 7"),
        (66, "<q", -3, "document 1: its bounds are 0 and -3"),
        (74, "<q", 5, "do not cover its 2 sequences"),
    ],
)
def test_an_index_that_does_not_fit_its_file_is_refused(tmp_path, offset, form, value, message):
    path = write_megatron(tmp_path / "a", [[[1, 2]], [[3, 4]]])
    change(path, offset, form, value)
    with pytest.raises(ValueError, match=message):
        list(iter_documents(str(path), "text"))


def test_any_wrong_byte_of_an_index_gives_one_error_or_ids_of_the_file(tmp_path):
    path = write_megatron(tmp_path / "a", [[[1, 2], [3]], [[4, 5, 6]]])
    index = path.read_bytes()
    outcomes = {"refused": 0, "read": 0}
    for offset in range(len(index)):
        for value in (0, 1, 3, 127, 128, 255):
            path.write_bytes(index[:offset] + bytes([value]) + index[offset + 1 :])
            try:
                tokens = sum(len(document) for document in iter_documents(str(path), "text"))
            except ValueError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)
                outcomes["refused"] += 1
            else:
                assert tokens <= 12, "no more than each of three sequences could have of a file with 12 bytes"
                outcomes["read"] += 1
    assert outcomes["refused"] > outcomes["read"] > 0


def test_a_file_that_breaks_off_or_is_missing_is_refused(tmp_path):
    path = write_megatron(tmp_path / "a", [[[1, 2]], [[3, 4]]])
    index = path.read_bytes()
    data = path.with_suffix(".bin").read_bytes()
    for size in (0, 20, len(index) - 1):
        path.write_bytes(index[:size])
        with pytest.raises(ValueError, match="a.idx: (is no index|has .* bytes, and its header asks for)"):
            find_source(str(path))
    path.write_bytes(index)
    path.with_suffix(".bin").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="document 2: the index puts 2 tokens at byte 4 of a.bin, which has 7"):
        cached(path, tmp_path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(ValueError, match=r"a.idx: a.bin does not lie beside it"):
        find_source(str(path))
    with pytest.raises(ValueError, match="Megatron files are read on this machine only"):
        list(iter_documents("memory://a.idx", "text"))


def test_a_document_of_too_many_tokens_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sparseforge_ds.data.text_formats.LARGEST_DOCUMENT", 3)
    path = write_megatron(tmp_path / "a", [[[1, 2], [3, 4]]])
    with pytest.raises(ValueError, match="document 1: has more than 3 tokens"):
        list(iter_documents(str(path), "text"))
