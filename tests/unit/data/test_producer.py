"""The process that tokenises a stream: it can end at any moment, and what it leaves is continued exactly."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sparseforge_ds.data import producer as producer_module
from sparseforge_ds.data.chunks import Sizes
from sparseforge_ds.data.producer import AHEAD, KEEP, Maker, Producer
from tests.distributed import ROOT
from tests.tiny_streams import SIZES, job, row_of, texts, write_stream

CHUNKS = 14


def expected(chunk, sizes=SIZES):
    start = sum(sizes.windows(other) for other in range(chunk)) * sizes.seq_length
    return row_of(texts(), start + sizes.windows(chunk) * sizes.seq_length)[start:]


@contextlib.contextmanager
def producing(some_job, say=lambda line: None):
    producer = Producer(some_job, say)
    try:
        yield producer
    finally:
        producer.close()
        assert producer.process.poll() is not None


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_chunks_are_the_row_without_a_gap(tmp_path):
    maker = Maker(job(write_stream(tmp_path / "text"), tmp_path / "data"))
    for chunk in range(CHUNKS):
        record = maker.make(chunk)
        assert maker.chunks.open(chunk).tolist() == expected(chunk)
        assert record == maker.chunks.record(chunk) == maker.make(chunk)


def test_chunks_come_out_the_same_in_any_order_and_by_any_maker(tmp_path):
    some_job = job(write_stream(tmp_path / "text"), tmp_path / "data")
    order = [9, 2, 2, 13, 0, 12, 5, 9]
    for chunk in order:
        maker = Maker(some_job)
        maker.make(chunk)
        assert maker.chunks.open(chunk).tolist() == expected(chunk)
        maker.chunks.discard(before=CHUNKS)
    maker = Maker(some_job)
    for chunk in order:
        maker.make(chunk)
        assert maker.chunks.open(chunk).tolist() == expected(chunk)


def test_a_record_alone_is_enough_to_make_a_chunk(tmp_path):
    """What a checkpoint has, when the cache is lost."""
    stream = write_stream(tmp_path / "text")
    record = Maker(job(stream, tmp_path / "data")).make(11)
    maker = Maker(job(stream, tmp_path / "elsewhere"))
    maker.chunks.adopt(11, record)
    maker.make(11)
    assert maker.chunks.open(11).tolist() == expected(11)
    assert maker.make(12)["start"] == record["end"]
    assert sorted(path.stem for path in (tmp_path / "elsewhere").glob("*.json")) == ["chunk_000011", "chunk_000012"]


def test_a_damaged_chunk_is_made_again(tmp_path):
    some_job = job(write_stream(tmp_path / "text"), tmp_path / "data")
    Maker(some_job).make(3)
    path = tmp_path / "data" / "chunk_000002.bin"
    path.write_bytes(path.read_bytes()[::-1])
    maker = Maker(some_job)
    maker.make(2)
    assert maker.chunks.open(2).tolist() == expected(2)


def test_a_text_that_has_changed_is_refused_when_a_chunk_is_made_again(tmp_path):
    Maker(job(write_stream(tmp_path / "text"), tmp_path / "data")).make(3)
    (tmp_path / "data" / "chunk_000000.bin").unlink()
    other = write_stream(tmp_path / "other", [text.replace("a", "b") for text in texts()])
    with pytest.raises(ValueError, match="chunk 0 .*differently from before"):
        Maker(job(other, tmp_path / "data")).make(0)


def test_catching_up_keeps_the_disk_bounded(tmp_path):
    maker = Maker(job(write_stream(tmp_path / "text"), tmp_path / "data"))
    maker.discard(30 - KEEP)
    maker.make(30)
    assert sorted(int(path.stem[6:]) for path in (tmp_path / "data").glob("*.bin")) == list(range(30 - KEEP, 31))
    assert len(list((tmp_path / "data").glob("*.json"))) == 31
    maker.make(4)
    assert maker.chunks.open(4).tolist() == expected(4), "one that is asked for is there all the same"


def test_the_process_makes_what_is_wanted_and_a_bit_ahead(tmp_path):
    with producing(job(write_stream(tmp_path / "text"), tmp_path / "data")) as producer:
        assert producer.wait(3)["tokens"] == 80
        until((tmp_path / "data" / f"chunk_{3 + AHEAD:06d}.json").exists)
        time.sleep(0.3)
        assert not (tmp_path / "data" / f"chunk_{3 + AHEAD + 1:06d}.json").exists()
        producer.wait(12)
        producer.discard(10)
        producer.wait(2)  # looks back further than anything that is kept
        assert Maker(job(write_stream(tmp_path / "text"), tmp_path / "data")).chunks.open(2).tolist() == expected(2)


def test_kill_9_at_random_moments_leaves_what_can_be_continued_exactly(tmp_path):
    """The producer is killed again and again while it makes chunks of some milliseconds each."""
    stream = write_stream(tmp_path / "text", texts(4000))
    sizes = Sizes(5, 20_000, 20_000)
    some_job, count, rng = job(stream, tmp_path / "data", sizes), 60, random.Random(0)
    kills, done = 0, 0
    while done <= count:
        producer = Producer(some_job, lambda line: None)
        last = done
        producer.wait(last)
        if kills < 12:
            moment = time.monotonic() + rng.uniform(0, 0.12)
            while time.monotonic() < moment and last < count:
                producer.want(last)
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
    chunks = some_job.chunks
    reference = np.array(row_of(texts(4000), (count + 1) * 20_000)).reshape(-1, 20_000)
    for chunk in range(count + 1):
        record = chunks.record(chunk)
        assert record is not None and (chunk == 0 or record["start"] == chunks.record(chunk - 1)["end"])
        if (tmp_path / "data" / f"chunk_{chunk:06d}.bin").exists():
            assert np.array_equal(chunks.open(chunk), reference[chunk])


def test_what_cannot_be_read_is_told_and_stays_told(tmp_path):
    stream = write_stream(tmp_path / "text")
    (tmp_path / "text" / "2.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with producing(job(stream, tmp_path / "data")) as producer:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"2\.jsonl, line 2: not JSON"):
                producer.wait(50)


def test_a_tokenizer_that_does_not_suit_the_model_is_refused(tmp_path):
    with (
        producing(job(write_stream(tmp_path / "text"), tmp_path / "data", vocabulary=256)) as producer,
        pytest.raises(ValueError, match="gives token 256, but the model knows 256"),
    ):
        producer.wait(0)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "data").write_text("in the way")
    with (
        producing(job(write_stream(tmp_path / "text"), tmp_path / "data")) as producer,
        pytest.raises(ValueError, match="FileExistsError.*--resume"),
    ):
        producer.wait(0)


def test_a_slow_text_and_its_end_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(producer_module, "_PATIENCE_SECONDS", 0.1)
    lines = []
    with producing(job(write_stream(tmp_path / "text"), tmp_path / "data"), lines.append) as producer:
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
        assert any("comes more slowly" in line for line in lines)
        producer.wait(60)
    assert sum("last document has been read; the first follows again" in line for line in lines) == 1


PARENT = """
import sys
from pathlib import Path
from tests.tiny_streams import job, write_stream
from sparseforge_ds.data.producer import Producer
producer = Producer(job(write_stream(Path(sys.argv[1]) / "text"), Path(sys.argv[1]) / "data"), print)
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

    until(gone, seconds=20)
