"""The folder of chunks."""

from __future__ import annotations

import itertools
import json
import os
import time

import numpy as np
import pytest

from sparseforge_ds.data.chunks import Chunks, Sizes


@pytest.fixture
def chunks(tmp_path):
    result = Chunks(tmp_path / "data", Sizes(5, 20, 80), "uint16")
    result.prepare()
    return result


def token(chunks, chunk, start=0):
    return np.arange(start, start + chunks.tokens(chunk), dtype=np.uint16)


def write(chunks, chunk, start=0):
    return chunks.write(chunk, token(chunks, chunk, start), {"at": chunk}, {"at": chunk + 1})


@pytest.mark.parametrize(
    ("sizes", "windows"),
    [
        (Sizes(5, 20, 80), [4, 8, 16, 16, 16]),
        (Sizes(30, 20, 80), [1, 1, 2, 2, 2]),
        (Sizes(500, 20, 80), [1, 1, 1, 1, 1]),
        (Sizes(3, 20, 70), [6, 13, 23, 23, 23]),
        (Sizes(5, 80, 80), [16, 16, 16, 16, 16]),
        (Sizes(2048), [128, 256, 512, 1024, 2048, 4096, 8192, 8192]),
    ],
)
def test_chunks_double_up_to_the_largest_and_every_window_has_one_place(sizes, windows):
    assert [sizes.windows(chunk) for chunk in range(len(windows))] == windows
    places = ((chunk, place) for chunk in itertools.count() for place in range(sizes.windows(chunk)))
    for sample in range(sum(windows) + 3):
        assert sizes.place(sample) == next(places)


def test_a_far_place_is_found_at_once():
    sizes = Sizes(8192)
    began = time.perf_counter()
    chunk, place = sizes.place(10**12)
    assert time.perf_counter() - began < 0.01
    assert sum(map(sizes.windows, range(6))) + (chunk - 6) * 2048 + place == 10**12


def test_what_was_written_is_there(chunks):
    record = write(chunks, 1)
    assert np.array_equal(chunks.open(1), token(chunks, 1))
    assert chunks.whole(1) == chunks.record(1) == record == json.loads(json.dumps(record))
    assert record["start"] == {"at": 1} and record["end"] == {"at": 2} and record["largest_id"] == 39
    assert chunks.whole(0) is chunks.record(0) is None
    assert sorted(path.name for path in chunks.folder.iterdir()) == ["chunk_000001.bin", "chunk_000001.json"]


@pytest.mark.parametrize("damage", [b"", b"\1" * 40, b"\1" * 80])
def test_damaged_tokens_are_not_whole(chunks, damage):
    write(chunks, 1)
    (chunks.folder / "chunk_000001.bin").write_bytes(damage)
    assert chunks.whole(1) is None
    assert chunks.record(1) is not None, "it can be made again"
    assert chunks.whole(1) is None
    write(chunks, 1)
    assert chunks.whole(1) is not None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tokens": 3}', "null"])
def test_a_damaged_record_says_so(chunks, content):
    write(chunks, 1)
    (chunks.folder / "chunk_000001.json").write_text(content)
    with pytest.raises(ValueError, match="chunk_000001.json is damaged.*remove"):
        chunks.record(1)


def test_a_chunk_that_comes_out_differently_is_refused(chunks):
    record = write(chunks, 1)
    with pytest.raises(ValueError, match="chunk 1 .*differently from before"):
        write(chunks, 1, start=7)
    with pytest.raises(ValueError, match="chunk 1 .*differently from before"):
        chunks.adopt(1, {**record, "sha256": "0"})
    assert np.array_equal(chunks.open(1), token(chunks, 1))


def test_discarded_tokens_leave_their_records(chunks):
    for chunk in range(4):
        write(chunks, chunk)
    chunks.discard(before=2)
    assert [chunks.whole(chunk) is not None for chunk in range(4)] == [False, False, True, True]
    assert all(chunks.record(chunk) for chunk in range(4))
    assert (chunks.newest_before(3), chunks.newest_before(0), chunks.newest_before(99)) == (2, -1, 3)
    with pytest.raises(ValueError, match="all machines of the run share"):
        chunks.open(0)


def test_leftovers_of_a_killed_writer_are_removed_and_those_of_a_living_one_are_not(chunks):
    old, new = chunks.folder / "chunk_000001.bin.1.tmp", chunks.folder / "chunk_000001.bin.2.tmp"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 3600,) * 2)
    chunks.prepare()
    assert not old.exists() and new.exists()


def test_a_full_disk_leaves_nothing_half_written(chunks, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(chunks, 1)
    assert list(chunks.folder.iterdir()) == []
