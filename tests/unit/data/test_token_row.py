"""The endless row of tokens of a stream, and continuing it from every token."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from sparseforge_ds.data import token_row
from sparseforge_ds.data.hub import HubStream
from sparseforge_ds.data.token_row import TokenRow
from tests.tiny_folders import byte_tokenizer
from tests.tiny_streams import row_of, texts, write_stream


def hub_stream(folder):
    folder.mkdir()
    for part in range(3):
        with gzip.open(folder / f"c4-train.{part:05d}-of-00003.json.gz", "wt") as file:
            file.writelines(
                json.dumps({"text": text, "url": "x"}) + "\n" for text in texts()[part * 20 : part * 20 + 20]
            )
    return HubStream(str(folder), "text")


def test_documents_follow_each_other_and_the_first_follows_the_last(tmp_path):
    row = TokenRow(write_stream(tmp_path), byte_tokenizer())
    length = sum(len(text) + 1 for text in texts() if text.strip())
    taken = [*row.take(1), *row.take(2 * length), *row.take(length - 1)]
    assert taken == row_of(texts(), 3 * length)
    assert row.take(1).dtype == np.uint16
    assert row.epoch == 3


@pytest.mark.parametrize(
    ("make", "documents", "step", "frame"),
    [
        *((write_stream, 1, 7, "auto"), (write_stream, 4, 1, "auto"), (write_stream, 256, 7, "auto")),
        *((hub_stream, 4, 151, "auto"), (write_stream, 4, 3, "both"), (write_stream, 4, 5, "eos")),
    ],
)
def test_it_continues_from_any_token(tmp_path, monkeypatch, make, documents, step, frame):
    """In the middle of a document, of a batch and of a file, before and after the end of the stream."""
    monkeypatch.setattr(token_row, "_DOCUMENTS_AT_A_TIME", documents)
    tokenizer, stream = byte_tokenizer(), make(tmp_path / "text")
    length = sum(len(text) + 1 + (frame == "both") for text in texts() if text.strip())
    reference = row_of(texts(), 3 * length, frame)
    row = TokenRow(stream, tokenizer, frame=frame)
    for position in range(0, length + 300, step):
        cursor = json.loads(json.dumps(row.cursor()))
        again = TokenRow(stream, tokenizer, cursor, frame)
        assert again.take(113).tolist() == reference[position : position + 113]
        # A cursor of a row that was itself continued is as good as one of the first row.
        third = TokenRow(stream, tokenizer, json.loads(json.dumps(again.cursor())), frame)
        assert third.take(50).tolist() == reference[position + 113 : position + 163]
        row.take(step)


def test_long_documents_come_in_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(token_row, "_CHARACTERS_AT_A_TIME", 50)
    sizes = []
    encode = token_row.encode
    monkeypatch.setattr(token_row, "encode", lambda batch, *how: sizes.append(len(batch)) or encode(batch, *how))
    documents = ["x" * 60] * 5 + ["y"] * 20
    row = TokenRow(write_stream(tmp_path, documents), byte_tokenizer())
    assert row.take(345).tolist() == row_of(documents, 345)
    assert sizes == [1, 1, 1, 1, 1, 20]


def test_another_text_at_the_cursor_is_refused(tmp_path):
    row = TokenRow(write_stream(tmp_path / "a"), byte_tokenizer())
    row.take(300)
    cursor = row.cursor()
    assert cursor["tokens"]
    with pytest.raises(ValueError, match="no longer what the run began with"):
        TokenRow(write_stream(tmp_path / "b", [text + "!" for text in texts()]), byte_tokenizer(), cursor)
    with pytest.raises(ValueError, match="no longer what the run began with"):
        TokenRow(write_stream(tmp_path / "c", texts()[:3]), byte_tokenizer(), cursor)


def test_a_stream_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no document has any text"):
        TokenRow(write_stream(tmp_path / "blank", ["", " ", "\n"]), byte_tokenizer()).take(1)
    with pytest.raises(ValueError, match="no document has any text"):
        TokenRow(write_stream(tmp_path / "none", []), byte_tokenizer()).take(1)
