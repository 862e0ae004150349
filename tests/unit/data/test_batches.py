"""The order of the data: one position, the same global batches at every world size."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.data.batches import Batches
from sparseforge_ds.data.micro_batch import BatchLayout
from sparseforge_ds.data.windows import CachedWindows
from tests.tiny_streams import ids_at, next_ids

TOKENS = np.arange(1000, dtype=np.uint16)


def batches(micro=2, accumulation=1, world_size=1, rank=0, seed=0, seq_length=10, key="text"):
    layout = BatchLayout(micro, accumulation, world_size, rank)
    return Batches([CachedWindows(TOKENS, key, seq_length, seed, layout.global_batch)], [1], layout)


def global_batch(micro, accumulation, world_size, steps):
    """(steps, B) first tokens of the sequences of every optimizer step, each step sorted."""
    ranks = [batches(micro, accumulation, world_size, rank) for rank in range(world_size)]
    result = []
    for _ in range(steps):
        firsts = [next_ids(rank)[:, 0] for _ in range(accumulation) for rank in ranks]
        result.append(torch.cat(firsts).sort().values)
    return torch.stack(result)


@pytest.mark.parametrize(
    ("micro", "accumulation", "world_size"), [(12, 1, 1), (3, 2, 2), (6, 1, 2), (1, 4, 3), (2, 2, 3)]
)
def test_the_global_batch_does_not_depend_on_the_ranks(micro, accumulation, world_size):
    assert torch.equal(global_batch(micro, accumulation, world_size, 20), global_batch(4, 3, 1, 20))


def test_a_step_is_seen_ahead_and_consumes_nothing():
    stream = batches(2, 3, 2, 1)
    for _ in range(20):
        position = stream.position
        ahead = stream.step()
        assert stream.position == position and len(ahead) == 3
        assert all(torch.equal(batch.token_BS, next_ids(stream)) and batch.trained is None for batch in ahead)


def test_windows_are_consecutive_tokens():
    stream = batches()
    for row in itertools.chain.from_iterable(next_ids(stream) for _ in range(60)):
        assert row.dtype == torch.int64
        assert torch.equal(row, torch.arange(row[0], row[0] + 10))
        assert row[0] % 10 == 0


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order():
    stream = batches(micro=4)
    epochs = [[int(row[0]) for _ in range(25) for row in next_ids(stream)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 1000, 10))
    assert epochs[0] != epochs[1]
    other = batches(4, seed=1)
    assert epochs[0] != [int(row[0]) for _ in range(25) for row in next_ids(other)]


@given(consumed=st.integers(0, 200), world_size=st.sampled_from([1, 2, 3, 6]))
def test_a_position_is_all_there_is_to_resume(consumed, world_size):
    straight = batches(6 // world_size, 1, world_size, world_size - 1)
    for _ in range(consumed):
        next_ids(straight)
    resumed = batches(6 // world_size, 1, world_size, world_size - 1)
    resumed.load_state_dict(straight.state_dict())
    for _ in range(5):
        assert torch.equal(next_ids(straight), next_ids(resumed))


def test_looking_ahead_consumes_nothing():
    stream = batches()
    ahead = ids_at(stream, 2)
    next_ids(stream)
    assert torch.equal(next_ids(stream), ahead)
    assert stream.position == 4


@pytest.mark.parametrize(
    ("other", "cure"), [({"key": "x"}, "--dataset"), ({"seq_length": 20}, "--seq_length"), ({"seed": 1}, "--seed")]
)
def test_a_position_in_other_data_is_refused(other, cure):
    state = batches(**other).state_dict()
    with pytest.raises(ValueError, match=cure):
        batches().load_state_dict(state)


def test_a_position_in_other_data_is_taken_on_request_and_what_differs_is_said(caplog):
    caplog.set_level(logging.INFO)

    def batches_of(facts, key, rank=0):
        windows = CachedWindows(TOKENS, key, 10, 0, 4, "text", facts)
        return Batches([windows], [1], BatchLayout(2, 1, 2, rank), takes_other_data=key == "new")

    files = {f"{i:02d}.txt": f"{i} bytes" for i in range(12)}
    old = batches_of({"--text_field": "text", "files": files}, "old")
    next_ids(old)
    state = old.state_dict()
    facts = {"--text_field": "body", "files": {**dict.fromkeys(list(files)[1:], "0 bytes"), "x.txt": "1 byte"}}
    with pytest.raises(
        ValueError, match=r'source1.--text_field was "text", is "body"; .*files.00.txt was "0 bytes", is null; .*files'
    ):
        batches_of(facts, "other").load_state_dict(state)
    for rank in (0, 1):
        new = batches_of(facts, "new", rank)
        new.load_state_dict(state)
        assert new.position == 4
        message = caplog.messages[-1] if caplog.messages else ""
        caplog.clear()
        assert message.count("--resume_other_data: goes on with another text") == (rank == 0)
        assert rank or message.count(".files.") == 7 and message.endswith("; and 6 more")


def test_the_summary_says_what_a_run_will_read():
    assert batches(micro=4).summary(100) == "text: 1,000 tokens; the run reads 4,000 (4.00 epochs)"


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="1,000 tokens, 2 windows of --seq_length 400: too little for one batch of 3"):
        batches(micro=3, seq_length=400)
    assert batches(micro=2, seq_length=400).summary(1) == "text: 1,000 tokens; the run reads 800 (0.80 epochs)"


def test_the_order_is_the_one_that_results_were_measured_with():
    """Results that were measured with this order can be had again."""
    stream = batches(micro=1, seed=3)
    first = [next_ids(stream)[0, 0].item() for _ in range(105)]
    order = [*np.random.default_rng([3, 0]).permutation(100), *np.random.default_rng([3, 1]).permutation(100)[:5]]
    assert first == [10 * i for i in order]
