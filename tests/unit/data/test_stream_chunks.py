"""The folder of chunks."""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import pytest

from sparseforge_ds.data.stream_chunks import Chunks, ChunkSizes


@pytest.fixture
def chunks(tmp_path):
    result = Chunks(tmp_path / "data", ChunkSizes(5, 20, 80), "uint16")
    result.prepare()
    return result


def write(chunks, chunk, start=0):
    token = np.arange(start, start + chunks.tokens(chunk), dtype=np.uint16)
    chunks.write(chunk, token, {"reader": {"at": chunk + 1}, "began": [0, 6], "used": 3, "epoch": 0, "skipped": 7})
    return token


@pytest.mark.parametrize(
    ("sizes", "windows"),
    [
        (ChunkSizes(5, 20, 80), [4, 8, 16, 16, 16]),
        (ChunkSizes(30, 20, 80), [1, 1, 2, 2, 2]),
        (ChunkSizes(500, 20, 80), [1, 1, 1, 1, 1]),
        (ChunkSizes(3, 20, 70), [6, 13, 23, 23, 23]),
        (ChunkSizes(5, 80, 80), [16, 16, 16, 16, 16]),
        (ChunkSizes(2048), [128, 256, 512, 1024, 2048, 4096, 8192, 8192]),
    ],
)
def test_chunks_double_up_to_the_largest_and_every_window_has_one_place(sizes, windows):
    assert [sizes.windows(chunk) for chunk in range(len(windows))] == windows
    positions = ((chunk, position) for chunk in itertools.count() for position in range(sizes.windows(chunk)))
    for sample in range(sum(windows) + 3):
        assert sizes.locate(sample) == next(positions)


def test_a_far_window_is_located_at_once():
    sizes = ChunkSizes(8192)
    began = time.process_time()
    chunk, position = sizes.locate(10**12)
    assert time.process_time() - began < 0.1
    assert sum(map(sizes.windows, range(6))) + (chunk - 6) * 2048 + position == 10**12


def test_written_chunks_are_read_back(chunks):
    assert chunks.finished() == 0 and chunks.record(0) is None
    token = write(chunks, 0)
    assert np.array_equal(chunks.open(0), token)
    record = chunks.record(0)
    written = {"reader": {"at": 1}, "began": [0, 6], "used": 3, "epoch": 0, "skipped": 7}
    assert record == {**written, "sha256": record["sha256"]}
    assert sorted(path.name for path in chunks.folder.iterdir()) == ["chunk_000000.bin", "chunk_000000.json"]
    write(chunks, 1)
    write(chunks, 3)
    chunks.check(1)
    assert chunks.finished() == 2, "behind a gap nothing can be continued"


@pytest.mark.parametrize("damage", [None, b"", b"\1" * 40, b"\1" * 80])
def test_damaged_tokens_are_found(chunks, damage):
    write(chunks, 0)
    write(chunks, 1)
    path = chunks.folder / "chunk_000001.bin"
    path.unlink() if damage is None else path.write_bytes(damage)
    chunks.check(0)
    with pytest.raises(ValueError, match=f"chunk_000001.bin is damaged.*remove {chunks.folder}.*--resume"):
        chunks.check(1)


def test_a_hash_speaks_of_all_chunks_so_far(chunks):
    hashes = set()
    for start in (0, 1):
        write(chunks, 0, start)
        write(chunks, 1)
        chunks.check(1)
        hashes.add(chunks.record(1)["sha256"])
    assert len(hashes) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"used": 3}', "null"])
def test_a_damaged_record_says_so(chunks, content):
    write(chunks, 0)
    (chunks.folder / "chunk_000000.json").write_text(content)
    with pytest.raises(ValueError, match="chunk_000000.json is damaged.*remove"):
        chunks.record(0)


def test_a_chunk_that_this_machine_cannot_see_says_so(chunks):
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
        write(chunks, 0)
    assert list(chunks.folder.iterdir()) == []
