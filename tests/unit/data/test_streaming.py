"""Streams as batches: one order, whatever the ranks, the kills and the state of the cache."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil

import numpy as np
import pytest
import torch

from sparseforge_ds.data import tokenization
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.data.micro_batch import BatchLayout
from sparseforge_ds.data.stream_chunks import ChunkSizes
from sparseforge_ds.data.tokenization import cache_key
from sparseforge_ds.ranks import AgreedError, Ranks
from tests.distributed import run_distributed
from tests.tiny_folders import byte_tokenizer
from tests.tiny_streams import SIZES, InPlace, ids_at, next_ids, open_stream, row_of, stream_of, texts, write_stream

SEED = 3
ONE_RANK = BatchLayout(2, 1, 1, 0)


def in_place(folder, layout=ONE_RANK, seed=SEED, sizes=SIZES):
    source = write_once(folder / "text")
    windows = open_stream(source, folder / "data", seed, sizes=sizes)
    windows.producer = InPlace(windows.producer.spec)
    return Batches([windows], [1], layout)


def write_once(folder, documents=None):
    if not folder.exists():
        write_stream(folder, documents)
    return stream_of(folder)


def order(count, seed=SEED, sizes=SIZES):
    """(count, S) the windows in the order of the run, as a literal loop."""
    result = []
    chunk = 0
    first = 0
    while len(result) < count:
        for window in np.random.default_rng([seed, chunk]).permutation(sizes.windows(chunk)):
            result.append(first + int(window))
        first += sizes.windows(chunk)
        chunk += 1
    row = np.array(row_of(texts(), first * sizes.seq_length)).reshape(-1, sizes.seq_length)
    return torch.from_numpy(row[result[:count]])


def test_windows_come_in_the_order_of_their_chunks(tmp_path):
    batches = in_place(tmp_path)
    assert torch.equal(torch.cat([next_ids(batches) for _ in range(300)]), order(600))
    assert not torch.equal(order(600), order(600, seed=4))


@pytest.mark.parametrize(("micro", "accumulation", "world_size"), [(12, 1, 1), (3, 2, 2), (1, 4, 3), (50, 1, 1)])
def test_the_global_batch_does_not_depend_on_the_ranks(tmp_path, micro, accumulation, world_size):
    ranks = [in_place(tmp_path, BatchLayout(micro, accumulation, world_size, rank)) for rank in range(world_size)]
    expected = order(600)
    size = micro * accumulation * world_size
    for step in range(600 // size):
        rows = torch.cat([next_ids(rank) for _ in range(accumulation) for rank in ranks])
        assert torch.equal(rows, expected[step * size : (step + 1) * size])


@pytest.mark.parametrize("cache", ["kept", "lost"])
def test_it_resumes_at_every_position_also_on_other_ranks(tmp_path, cache):
    """Resume within documents and chunks, around the end of the text, and from the checkpoint alone."""
    expected = order(1000)
    batches = in_place(tmp_path, BatchLayout(6, 1, 1, 0))
    for position in range(0, 900, 6):
        state = json.loads(json.dumps(batches.state_dict()))
        if position % (54 if cache == "lost" else 18) == 0:
            if cache == "lost":
                shutil.rmtree(tmp_path / "data", ignore_errors=True)
            for world_size in (1, 2):
                ranks = [
                    in_place(tmp_path, BatchLayout(6 // world_size, 1, world_size, rank)) for rank in range(world_size)
                ]
                for rank in ranks:
                    rank.load_state_dict(state)
                    assert json.loads(json.dumps(rank.state_dict())) == state
                for step in range(3):
                    start = position + step * 6
                    assert torch.equal(torch.cat([next_ids(rank) for rank in ranks]), expected[start : start + 6])
        next_ids(batches)


def test_probes_look_ahead_and_back_without_consuming(tmp_path):
    expected = order(1000)
    batches = in_place(tmp_path)
    for ahead in range(40):
        assert torch.equal(ids_at(batches, 2 * ahead), expected[2 * ahead : 2 * ahead + 2])
    for _ in range(450):
        next_ids(batches)
    for position in range(898, 0, -6):
        assert torch.equal(ids_at(batches, position), expected[position : position + 2])
    assert torch.equal(next_ids(batches), expected[900:902])


@pytest.mark.parametrize(
    ("other", "cure"), [({"sizes": ChunkSizes(10, 20, 80)}, "--seq_length"), ({"seed": 9}, "--seed"), ({}, "damaged")]
)
def test_a_position_in_another_order_is_refused(tmp_path, other, cure):
    state = in_place(tmp_path, **other).state_dict()
    if not other:
        state["sources"][0]["newest"] = [1]
    with pytest.raises(ValueError, match=cure):
        in_place(tmp_path).load_state_dict(state)


@pytest.mark.parametrize("change", ["a file more", "another file"])
def test_another_text_is_read_on_at_the_same_position_on_request(tmp_path, caplog, change):
    """Go on as if the run had always read the other text."""
    caplog.set_level(logging.INFO)
    batches = in_place(tmp_path)
    for _ in range(130):
        next_ids(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    name = "3.jsonl" if change == "a file more" else "0.jsonl"
    (tmp_path / "text" / name).write_text("".join(json.dumps({"text": f"new {i}"}) + "\n" for i in range(30)))
    difference = f'files.{name} was {".* bytes, hash .*" if name[0] == "0" else "null"}, is ".* bytes, hash'
    with pytest.raises(ValueError, match=f"trained on other data .data.source1.{difference}.*--resume_other_data"):
        in_place(tmp_path).load_state_dict(state)
    shutil.copytree(tmp_path / "text", tmp_path / "fresh" / "text")
    batches, fresh = in_place(tmp_path), in_place(tmp_path / "fresh")
    batches.takes_other_data = True
    batches.load_state_dict(state)
    assert (
        f"--resume_other_data: goes on with another text than the checkpoint's: data.source1.files.{name}"
        in caplog.text
    )
    for _ in range(130):
        next_ids(fresh)
    assert all(torch.equal(next_ids(batches), next_ids(fresh)) for _ in range(200))


def test_renamed_files_are_the_same_text_and_cost_nothing(tmp_path):
    batches = in_place(tmp_path)
    while batches.progress()[0].epochs < 2:
        next_ids(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    for path in (tmp_path / "text").iterdir():
        path.rename(path.with_stem(f"renamed-{path.stem}"))
    again = in_place(tmp_path)
    again.load_state_dict(state)
    assert all(torch.equal(next_ids(again), next_ids(batches)) for _ in range(10))
    assert len(list((tmp_path / "data").iterdir())) == 1, "one cache"


@pytest.mark.parametrize("windows", [260, 28], ids=["inside a chunk", "at the end of one"])
def test_a_lost_cache_that_comes_out_differently_is_refused(tmp_path, monkeypatch, windows):
    """Another version of tokenizers, say, under the same name."""
    assert sum(SIZES.windows(chunk) for chunk in range(3)) == 28
    batches = in_place(tmp_path)
    for _ in range(windows // 2):
        next_ids(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    shutil.rmtree(tmp_path / "data")
    encode = tokenization.tokenize
    monkeypatch.setattr(tokenization, "tokenize", lambda *arguments: [ids[::-1] for ids in encode(*arguments)])
    batches = in_place(tmp_path)
    batches.load_state_dict(state)
    with pytest.raises(ValueError, match="differs from the one that the checkpoint was trained on: text,"):
        next_ids(batches)


def test_skipped_documents_are_counted_and_logged_also_after_resuming(tmp_path):
    blank = sum(not text.strip() for text in texts())
    batches = in_place(tmp_path)
    logged = []
    while batches.progress()[0].epochs < 5:
        next_ids(batches)
        logged.append(batches.scalars().get("data/without_text", 0))
        if batches.position % 50 == 0:
            state = json.loads(json.dumps(batches.state_dict()))
            batches = in_place(tmp_path)
            batches.load_state_dict(state)
    assert 4 * blank <= logged[-1] < 7 * blank and logged == sorted(logged)


def test_resuming_requests_the_chunk_at_once(tmp_path):
    batches = in_place(tmp_path)
    batches.load_state_dict({**batches.state_dict(), "position": 100})
    assert batches.sources[0].producer.requested == [SIZES.locate(100)[0]]


def test_a_tokenizer_that_cannot_separate_documents_is_refused(tmp_path):
    tokenizer = byte_tokenizer(bos=False)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        cache_key(write_once(tmp_path / "text"), tokenizer)


def test_another_frame_is_other_data(tmp_path):
    stream = write_once(tmp_path / "text")
    keys = [cache_key(stream, byte_tokenizer(), frame)[0] for frame in ("auto", "bos", "eos", "both")]
    assert keys[0] == keys[1] and len(set(keys)) == 3


@contextlib.contextmanager
def on_ranks(folder, micro):
    """Batches as the trainer makes them, on a rank of a real process group."""
    ranks = Ranks()
    stream = write_once(folder / "text")
    windows = open_stream(stream, folder / "data", SEED, ranks)
    try:
        yield Batches([windows], [1], BatchLayout(micro, 1, ranks.world_size, ranks.rank))
    finally:
        if windows.producer is not None:
            windows.producer.close()


def read_on_ranks(folder, micro, steps, state):
    with on_ranks(folder, micro) as batches:
        if state is not None:
            batches.load_state_dict(state)
        batches.prepare_step()
        stride = micro * batches.layout.world_size
        for probe in range(5):  # what the curvature needs before the first step
            ids_at(batches, batches.position + probe * stride)
        ahead = ids_at(batches, batches.position + (steps - 1) * stride)
        rows = torch.stack([next_ids(batches) for _ in range(steps)])
        assert torch.equal(ahead, rows[-1])
        return rows, batches.state_dict()


@pytest.mark.parametrize("cache", ["kept", "lost"])
def test_ranks_resume_bit_for_bit_at_any_world_size(tmp_path, cache):
    write_once(tmp_path / "text")
    expected = order(12 * 70)
    parts = []
    state = None
    for world_size, steps in ((2, 11), (2, 20), (1, 14), (3, 25)):
        results = run_distributed(read_on_ranks, world_size, tmp_path, 12 // world_size, steps, state)
        parts += [torch.cat([rows[step] for rows, _ in results]) for step in range(steps)]
        states = [json.dumps(state) for _, state in results]
        assert len(set(states)) == 1, "every rank knows the whole state"
        state = json.loads(states[0])
        if cache == "lost":
            shutil.rmtree(tmp_path / "data")
    assert torch.equal(torch.cat(parts), expected)


def fail_on_ranks(folder, break_it):
    with on_ranks(folder, 4) as batches:
        if break_it == "kill":
            next_ids(batches)
            producer = batches.sources[0].producer
            if producer is not None and producer.process is not None:
                producer.process.kill()
        try:
            for _ in range(3000):
                next_ids(batches)
        except AgreedError as error:
            return str(error), batches.position
        return "no error", batches.position


@pytest.mark.parametrize(("break_it", "message"), [("row", r"2.jsonl, line 2: not JSON"), ("kill", "ended (signal 9)")])
def test_errors_of_the_producer_are_raised_on_every_rank(tmp_path, break_it, message):
    write_once(tmp_path / "text", texts(1200))
    if break_it == "row":
        (tmp_path / "text" / "2.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (first, position), (second, other) = run_distributed(fail_on_ranks, 2, tmp_path, break_it)
    assert message in first and first == second and position == other > 0
