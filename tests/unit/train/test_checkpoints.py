"""What counts as a checkpoint that can be resumed; saving and loading are tested by tests/end_to_end."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from sparseforge_ds.train.checkpoints import Checkpoints, random_state, set_random_state


class TwoRanks:
    """Rank 0 of two, as far as looking for a checkpoint goes."""

    rank = 0
    world_size = 2


@pytest.fixture
def checkpoints(tmp_path):
    for step in (100, 200):
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        (folder / "a.pt").write_bytes(b"12345")
        record = {"format": 1, "step": step, "world_size": 2, "zero_stage": 3, "files": {"a.pt": 5}}
        (folder / "checkpoint.json").write_text(json.dumps(record))
    (tmp_path / "latest").write_text("step_000200")
    return Checkpoints(tmp_path, TwoRanks(), stage=3, keep=2)


def test_the_newest_complete_checkpoint_is_found(checkpoints):
    assert checkpoints.find() == (checkpoints.folder / "step_000200", 200)


def test_a_user_may_go_back_to_an_older_one(checkpoints):
    (checkpoints.folder / "latest").write_text("step_000100\n")
    assert checkpoints.find() == (checkpoints.folder / "step_000100", 100)


def edit(checkpoints, **changes):
    path = checkpoints.folder / "step_000200" / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: (c.folder / "latest").unlink(), "no checkpoint in .*without --resume"),
        (lambda c: (c.folder / "latest").write_text("step_000300"), "which is no checkpoint.*step_000100, step_000200"),
        (lambda c: (c.folder / "latest").write_text("../elsewhere"), "which is no checkpoint"),
        (lambda c: (c.folder / "latest").write_text(""), "which is no checkpoint"),
        (lambda c: (c.folder / "step_000200" / "checkpoint.json").unlink(), "not written by this trainer"),
        (lambda c: (c.folder / "step_000200" / "checkpoint.json").write_text("{"), "not written by this trainer"),
        (lambda c: (c.folder / "step_000200" / "a.pt").unlink(), r"incomplete: a\.pt is missing.*step_000100"),
        (lambda c: (c.folder / "step_000200" / "a.pt").write_bytes(b"123"), "has 3 bytes instead of 5"),
        (lambda c: edit(c, format=0), "has format 0, this version of sparseforge_ds reads 1"),
        (lambda c: edit(c, world_size=4), "saved by 4 ranks at ZeRO stage 3, this run has 2 at stage 3"),
        (lambda c: edit(c, zero_stage=1), "saved by 2 ranks at ZeRO stage 1, this run has 2 at stage 3"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_says_why(checkpoints, damage, message):
    damage(checkpoints)
    with pytest.raises(ValueError, match=f"--resume: .*{message}"):
        checkpoints.find()


def test_leftovers_of_a_crash_are_swept(checkpoints):
    (checkpoints.folder / "step_000300.tmp").mkdir()
    (checkpoints.folder / "step_000300.tmp" / "half.pt").write_bytes(b"1")
    (checkpoints.folder / "latest.tmp").write_text("step_0003")
    checkpoints.sweep()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["latest", "step_000100", "step_000200"]


def draw():
    return random.random(), float(np.random.rand()), float(np.random.randn()), torch.rand(2).tolist()


def test_random_state_survives_a_file_that_loads_weights_only(tmp_path):
    draw()
    torch.save(random_state(), tmp_path / "rng.pt")
    expected = draw()
    draw()
    set_random_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == expected
