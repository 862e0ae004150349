"""The process that tokenizes a stream: it can end at any moment, and what it leaves is continued exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sparseforge_ds.data import producer as producer_module
from sparseforge_ds.data import tokenization
from sparseforge_ds.data.hub_text import HubText
from sparseforge_ds.data.producer import AHEAD, ChunkWriter, Producer
from sparseforge_ds.data.stream_chunks import ChunkSizes
from tests.distributed import PATIENCE, ROOT
from tests.tiny_streams import SIZES, chunk_spec, row_of, texts, write_stream

CHUNKS = 14


def expected(chunk, sizes=SIZES):
    start = sum(sizes.windows(other) for other in range(chunk)) * sizes.seq_length
    return row_of(texts(), start + sizes.windows(chunk) * sizes.seq_length)[start:]


@contextlib.contextmanager
def producing(spec):
    producer = Producer(spec)
    try:
        yield producer
    finally:
        producer.close()
        assert producer.process is None or producer.process.poll() is not None


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def make(spec, count):
    """Make the chunks before `count` by a writer that goes on where the folder ends."""
    writer = ChunkWriter(spec)
    while writer.finished < count:
        writer.write_next()
    return writer.chunks


def test_chunks_are_the_row_without_a_gap(tmp_path):
    chunks = make(chunk_spec(write_stream(tmp_path / "text"), tmp_path / "data"), CHUNKS)
    for chunk in range(CHUNKS):
        assert chunks.open(chunk).tolist() == expected(chunk)
        chunks.check(chunk)


def hub_stream(folder):
    folder.mkdir()
    for part in range(3):
        with gzip.open(folder / f"c4-train.{part:05d}-of-00003.json.gz", "wt") as file:
            file.writelines(
                json.dumps({"text": text, "url": "x"}) + "\n" for text in texts()[part * 20 : part * 20 + 20]
            )
    return HubText(str(folder))


@pytest.mark.parametrize(
    ("write", "documents", "frame"),
    [
        *((write_stream, 1, "auto"), (write_stream, 4, "auto"), (write_stream, 256, "auto")),
        *((hub_stream, 4, "auto"), (write_stream, 4, "both"), (write_stream, 4, "eos")),
    ],
)
def test_every_chunk_may_be_written_by_another_writer(tmp_path, monkeypatch, write, documents, frame):
    """Change the writer in the middle of documents, batches and files, before and after the end of the text."""
    monkeypatch.setattr(tokenization, "DOCUMENTS_AT_A_TIME", documents)
    spec = dataclasses.replace(chunk_spec(write(tmp_path / "text"), tmp_path / "data"), frame=frame)
    count = 100
    end = sum(SIZES.windows(chunk) for chunk in range(100)) * SIZES.seq_length
    for finished in range(count):
        make(spec, finished + 1)
    chunks = spec.chunks
    row = [token for chunk in range(count) for token in chunks.open(chunk).tolist()]
    assert row == row_of(texts(), end, frame)
    length = sum(len(text) + 1 + (frame == "both") for text in texts() if text.strip())
    blank = sum(not text.strip() for text in texts())
    last = chunks.record(count - 1)
    assert abs(last["epoch"] - end // length) <= 1 and end // length >= 2
    assert abs(last["skipped"] - blank * end // length) <= 2 * blank


def test_long_documents_come_in_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "CHARACTERS_AT_A_TIME", 50)
    sizes: list[int] = []
    encode = tokenization.tokenize
    monkeypatch.setattr(
        tokenization, "tokenize", lambda batch, *arguments: sizes.append(len(batch)) or encode(batch, *arguments)
    )
    documents = ["x" * 60] * 5 + ["y"] * 20
    chunks = make(chunk_spec(write_stream(tmp_path / "text", documents), tmp_path / "data"), 6)
    row = [token for chunk in range(6) for token in chunks.open(chunk).tolist()]
    assert row == row_of(documents, 380)
    assert set(sizes) == {1, 20}


def test_a_long_document_lies_once_on_the_disk(tmp_path):
    spec = chunk_spec(write_stream(tmp_path / "text", ["x" * 5000]), tmp_path / "data")
    for finished in range(30):
        make(spec, finished + 1)
    tokens = sum(SIZES.windows(chunk) for chunk in range(30)) * SIZES.seq_length
    assert sum(path.stat().st_size for path in (tmp_path / "data").glob("*.bin")) == 2 * tokens
    assert [token for chunk in range(30) for token in spec.chunks.open(chunk)] == row_of(["x" * 5000], tokens)


def test_a_stream_without_text_is_refused(tmp_path):
    for name, documents in (("blank", ["", " ", "\n"]), ("none", [])):
        spec = chunk_spec(write_stream(tmp_path / name, documents), tmp_path / f"{name} data")
        with pytest.raises(ValueError, match=rf"--dataset stream:.*{name}: there is no text in it"):
            make(spec, 1)


def test_a_damaged_chunk_is_refused(tmp_path):
    spec = chunk_spec(write_stream(tmp_path / "text"), tmp_path / "data")
    make(spec, 4)
    path = tmp_path / "data" / "chunk_000002.bin"
    path.write_bytes(path.read_bytes()[::-1])
    with producing(spec) as producer:
        producer.wait(3)
        with pytest.raises(ValueError, match="chunk_000002.bin is damaged.*--resume"):
            producer.wait(2)


def test_the_process_writes_requested_chunks_and_some_ahead(tmp_path):
    with producing(chunk_spec(write_stream(tmp_path / "text"), tmp_path / "data")) as producer:
        assert producer.wait(3)["used"] >= 0
        until((tmp_path / "data" / f"chunk_{3 + AHEAD:06d}.json").exists)
        time.sleep(0.3)
        assert not (tmp_path / "data" / f"chunk_{3 + AHEAD + 1:06d}.json").exists()
        producer.wait(12)
        producer.wait(2)  # all of them stay
    with producing(chunk_spec(write_stream(tmp_path / "text"), tmp_path / "data")) as producer:
        assert producer.wait(12) == producer.spec.chunks.record(12), "what is there is not made again"
        assert producer.spec.chunks.open(12).tolist() == expected(12)


def test_kill_9_at_random_moments_leaves_what_can_be_continued_exactly(tmp_path):
    """Kill the producer again and again while it makes chunks of some milliseconds each."""
    stream = write_stream(tmp_path / "text", texts(4000))
    sizes = ChunkSizes(5, 20_000, 20_000)
    spec = chunk_spec(stream, tmp_path / "data", sizes)
    count = 30
    rng = random.Random(0)
    kills = 0
    done = 0
    # Each producer goes on where the last one was killed; the sixth may finish.
    while done <= count:
        producer = Producer(spec)
        last = done
        producer.wait(last)
        if kills < 5:
            moment = time.monotonic() + rng.uniform(0, 0.12)
            while time.monotonic() < moment and last < count:
                producer.request(last)
                last += 1
                time.sleep(0.005)
            producer.process.kill()
            kills += 1
            with pytest.raises(ValueError, match="signal 9"):
                producer.wait(count + AHEAD)
            done = sum(1 for _ in (tmp_path / "data").glob("chunk_*.json"))
        else:
            producer.wait(count)
            done = count + 1
        producer.close()
    # The chunks are those of a producer that nobody killed.
    chunks = spec.chunks
    reference = np.array(row_of(texts(4000), (count + 1) * 20_000)).reshape(-1, 20_000)
    for chunk in range(count + 1):
        chunks.check(chunk)
        assert np.array_equal(chunks.open(chunk), reference[chunk])


def test_an_unreadable_text_is_reported_and_stays_an_error(tmp_path):
    stream = write_stream(tmp_path / "text")
    (tmp_path / "text" / "2.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with producing(chunk_spec(stream, tmp_path / "data")) as producer:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"2\.jsonl, line 2: not JSON"):
                producer.wait(50)


def test_a_tokenizer_that_does_not_suit_the_model_is_refused(tmp_path):
    with (
        producing(chunk_spec(write_stream(tmp_path / "text"), tmp_path / "data", vocabulary=256)) as producer,
        pytest.raises(ValueError, match="gives token 256, but the model knows 256"),
    ):
        producer.wait(0)


def test_an_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "data").write_text("in the way")
    with (
        producing(chunk_spec(write_stream(tmp_path / "text"), tmp_path / "data")) as producer,
        pytest.raises(ValueError, match="FileExistsError.*--resume"),
    ):
        producer.wait(0)


def test_nobody_waits_for_text_once_a_run_is_to_end(tmp_path):
    with producing(chunk_spec(write_stream(tmp_path / "text"), tmp_path / "data")) as producer:
        producer.request(0)
        os.kill(producer.process.pid, signal.SIGSTOP)
        answers = iter([False, False, True])
        producer.should_stop = lambda: next(answers)
        with pytest.raises(ValueError, match="a signal ended the wait for its text"):
            producer.wait(0)


def test_a_slow_text_is_logged(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(producer_module, "PATIENCE_SECONDS", 0.1)
    with producing(chunk_spec(write_stream(tmp_path / "text"), tmp_path / "data")) as producer:
        producer.request(0)
        os.kill(producer.process.pid, signal.SIGSTOP)
        timer = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import os,time; time.sleep(1); os.kill({producer.process.pid}, {int(signal.SIGCONT)})",
            ]
        )
        producer.wait(0)
        timer.wait()
        assert "comes more slowly" in caplog.text


PARENT = """
import sys
from pathlib import Path
from tests.tiny_streams import chunk_spec, write_stream
from sparseforge_ds.data.producer import Producer
producer = Producer(chunk_spec(write_stream(Path(sys.argv[1]) / "text"), Path(sys.argv[1]) / "data"))
producer.wait(0)
print(producer.process.pid, flush=True)
producer.wait(10**9)
"""


def test_the_process_ends_when_rank_0_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def gone():
        try:
            with open(f"/proc/{child}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(gone)
