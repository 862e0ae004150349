"""Mixtures as batches: exact shares, one order whatever the ranks, and one position that says it all."""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.data.batches import Batches
from sparseforge_ds.data.micro_batch import BatchLayout
from sparseforge_ds.data.round_robin import RoundRobin
from sparseforge_ds.data.windows import CachedWindows, ReadProgress
from sparseforge_ds.ranks import Ranks
from tests.distributed import run_distributed
from tests.tiny_streams import InPlace, next_ids, open_stream, stream_of, texts, write_stream

SEED = 3
PARTS = (3, 5, 2)
OF_SOURCE = 1000


def packed(source, windows, seed=SEED):
    """Return a source whose window i holds the ids 1000 * source + i."""
    token = np.repeat(np.arange(windows) + OF_SOURCE * source, 5).astype(np.uint32)
    return CachedWindows(token, f"text {source}", 5, seed, 1, f"source/{source}")


ONE_RANK = BatchLayout(2, 1, 1, 0)


def mixed(layout=ONE_RANK, parts=PARTS, seed=SEED, windows=(40, 70, 9)):
    sources = [packed(source, count, seed) for source, count in enumerate(windows)]
    return Batches(sources, parts, layout)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_every_source_has_its_share_at_any_moment(parts):
    order = RoundRobin(parts).order
    had = np.stack([np.cumsum(order == source) for source in range(len(parts))], axis=1)
    share = np.outer(np.arange(1, len(order) + 1), np.array(parts) / sum(parts))
    assert np.abs(had - share).max() < 2
    assert had[-1].tolist() == parts


def test_shares_of_tokens_are_the_weights_and_no_window_of_a_source_is_left_out():
    batches = mixed(windows=(40, 70, 9))
    drawn = torch.cat([next_ids(batches)[:, 0] for _ in range(32 * 25)])
    counts = torch.bincount(drawn // OF_SOURCE, minlength=3)
    assert counts.tolist() == [480, 800, 320], "3:5:2 of 1,600"
    for source, windows in enumerate((40, 70, 9)):
        of_source = (drawn[drawn // OF_SOURCE == source] % OF_SOURCE).tolist()
        alone = packed(source, windows)
        expected = [int(alone.window(i)[0]) % OF_SOURCE for i in range(len(of_source))]
        assert sorted(of_source) == sorted(expected)
        assert len({of_source.count(i) for i in range(windows)}) <= 2, "no window twice before each was there once"


def test_shares_hold_in_every_step():
    batches = mixed(BatchLayout(10, 1, 1, 0), windows=(500, 500, 500))
    for _ in range(64):
        assert torch.bincount(next_ids(batches)[:, 0] // OF_SOURCE).tolist() == list(PARTS)


@pytest.mark.parametrize(
    ("micro", "accumulation", "world_size"), [(12, 1, 1), (3, 2, 2), (1, 4, 3), (6, 1, 2), (2, 2, 3)]
)
def test_the_global_batch_does_not_depend_on_the_ranks(micro, accumulation, world_size):
    ranks = [mixed(BatchLayout(micro, accumulation, world_size, rank)) for rank in range(world_size)]
    one_rank = mixed(BatchLayout(12, 1, 1, 0))
    for _ in range(20):
        assert torch.equal(
            torch.cat([next_ids(rank) for _ in range(accumulation) for rank in ranks]), next_ids(one_rank)
        )


@given(consumed=st.integers(0, 200), world_size=st.sampled_from([1, 2, 3, 6]))
def test_a_position_is_all_there_is_to_resume(consumed, world_size):
    layout = BatchLayout(6 // world_size, 1, world_size, world_size - 1)
    straight, resumed = mixed(layout), mixed(layout)
    straight.position = 6 * consumed
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for _ in range(3):
        assert torch.equal(next_ids(straight), next_ids(resumed))


def test_the_order_belongs_to_seed_and_weights():
    first, again = (torch.cat([next_ids(batches) for _ in range(50)]) for batches in (mixed(), mixed()))
    assert torch.equal(first, again)
    for other in (mixed(seed=4), mixed(parts=(3, 5, 3))):
        assert not torch.equal(first, torch.cat([next_ids(other) for _ in range(50)]))


@pytest.mark.parametrize(
    ("other", "cure"),
    [
        ({"parts": (3, 5, 3)}, r"data.shares was \[3, 5, 3\], is .*--dataset"),
        ({"seed": 4}, "--seed"),
        ({}, "data.source3.* was null, is"),
    ],
)
def test_a_position_in_another_mixture_is_refused(other, cure):
    state = mixed(**other).state_dict()
    if not other:
        state["sources"] = state["sources"][:2]
    with pytest.raises(ValueError, match=cure):
        mixed().load_state_dict(state)


def test_another_mixture_is_read_on_at_the_same_position_on_request(tmp_path, caplog):
    """Other shares, and another number of sources: as if the run had always read them."""
    caplog.set_level(logging.INFO)
    before = in_place(tmp_path)
    for _ in range(100):
        next_ids(before)
    for other in (mixed(), Batches(before.sources[1:2], [1], ONE_RANK)):
        state = json.loads(json.dumps(other.state_dict()))
        caplog.clear()
        with pytest.raises(ValueError, match="--resume_other_data"):
            in_place(tmp_path).load_state_dict(state | {"position": 200})
        batches, fresh = in_place(tmp_path), in_place(tmp_path)
        batches.takes_other_data = True
        batches.load_state_dict(state | {"position": 200})
        assert "goes on with another text" in caplog.text
        for _ in range(100):
            next_ids(fresh)
        assert all(torch.equal(next_ids(batches), next_ids(fresh)) for _ in range(30))


def test_what_each_source_has_given_is_logged():
    batches = mixed(windows=(40, 70, 9))
    for _ in range(160):
        next_ids(batches)
    assert batches.progress() == [
        ReadProgress("source/0", 96, 96 / 40),
        ReadProgress("source/1", 160, 160 / 70),
        ReadProgress("source/2", 64, 64 / 9),
    ]
    assert sum(RoundRobin(PARTS).counts_before(77)) == 77
    assert batches.scalars()["data/2_source_2/tokens"] == 320 and batches.scalars()["data/0_source_0/epochs"] == 2.4


def test_the_summary_says_of_every_source_what_a_run_will_read():
    assert mixed().summary(100).splitlines() == [
        "shares of the tokens; a source that ends begins again",
        "30.00% source/0: 200 tokens; the run reads 300 (1.50 epochs)",
        "50.00% source/1: 350 tokens; the run reads 500 (1.43 epochs)",
        "20.00% source/2: 45 tokens; the run reads 200 (4.44 epochs)",
    ]


def documents(name):
    return [f"{name} {text}" if text.strip() else text for text in texts(14)]


def streams(folder):
    result = []
    for name in ("one", "two"):
        if not (folder / name).exists():
            write_stream(folder / name, documents(name))
        result.append(stream_of(folder / name))
    return result


def in_place(folder, layout=ONE_RANK):
    """Return a text that is there in full and two streams, without processes."""
    sources = [packed(0, 30)]
    for stream in streams(folder):
        windows = open_stream(stream, folder / "data", SEED)
        windows.producer = InPlace(windows.producer.spec)
        sources.append(windows)
    return Batches(sources, (2, 5, 3), layout)


def test_streams_resume_mid_document_at_every_position_on_other_ranks_without_the_cache(tmp_path):
    straight = in_place(tmp_path, BatchLayout(6, 1, 1, 0))
    expected = torch.cat([next_ids(straight) for _ in range(150)])
    batches = in_place(tmp_path, BatchLayout(6, 1, 1, 0))
    for position in range(0, 840, 6):
        state = json.loads(json.dumps(batches.state_dict()))
        if position % 42 == 0:
            shutil.rmtree(tmp_path / "data", ignore_errors=True)
            ranks = [in_place(tmp_path, BatchLayout(3, 1, 2, rank)) for rank in range(2)]
            for rank in ranks:
                rank.load_state_dict(state)
                assert json.loads(json.dumps(rank.state_dict())) == state
            for start in range(position, position + 18, 6):
                assert torch.equal(torch.cat([next_ids(rank) for rank in ranks]), expected[start : start + 6])
        next_ids(batches)
    assert RoundRobin((2, 5, 3)).counts_before(640) == [128, 320, 192]
    for name, reading in zip(("one", "two"), batches.progress()[1:], strict=True):
        once = sum(1 + len(text) for text in documents(name) if text.strip())
        assert abs(reading.epochs - reading.windows * 5 / once) < 1.5 + 80 / once, "with what was read ahead"


def read_on_ranks(folder, steps, state):
    """Read with a real process group and a process for each stream."""
    ranks = Ranks()
    sources = [packed(0, 30)]
    for stream in streams(folder):
        sources.append(open_stream(stream, folder / "data", SEED, ranks))
    batches = Batches(sources, (2, 5, 3), BatchLayout(3, 2, ranks.world_size, ranks.rank))
    batches.load_state_dict(state)
    rows = []
    for _ in range(steps):
        batches.prepare_step()
        rows += [next_ids(batches), next_ids(batches)]
    for source in sources[1:]:
        if source.producer is not None:
            source.producer.close()
    return torch.stack(rows)


def test_ranks_continue_where_another_number_of_them_stopped(tmp_path):
    batches = in_place(tmp_path, BatchLayout(12, 1, 1, 0))
    for _ in range(11):
        next_ids(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    expected = torch.cat([next_ids(batches) for _ in range(8)])
    shutil.rmtree(tmp_path / "data")
    rows = run_distributed(read_on_ranks, 2, tmp_path, 8, state)
    assert torch.equal(torch.stack(rows, dim=1).flatten(0, 2), expected)
