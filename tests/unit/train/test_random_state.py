"""Random number generators of a rank, saved and set."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from sparseforge_ds.train.random_state import random_state as present_state
from sparseforge_ds.train.random_state import read_random_state, seed_anew, set_random_state


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(2).tolist(),
    )


def test_the_state_survives_a_json_file(tmp_path):
    draw()
    (tmp_path / "random_00000.json").write_text(json.dumps(present_state()))
    expected = draw(), draw()
    draw()
    set_random_state(read_random_state(tmp_path / "random_00000.json"))
    assert (draw(), draw()) == expected


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"accelerator": 1}', "\x00"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "random_00003.json").write_text(content)
    with pytest.raises(ValueError, match=r"random_00003\.json"):
        read_random_state(tmp_path / "random_00003.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("python", [3, [1, 2], None]),
        ("python", None),
        ("numpy", ["MT19937", [1, 2], 0, 0, 0.0]),
        ("numpy", ["MT19937", [-1] * 624, 0, 0, 0.0]),
        ("torch", "AAAA"),
        ("torch", [1, 2]),
        ("torch", [256] * 5056),
        ("torch", 3),
        ("accelerator", []),
    ],
)
def test_a_state_of_something_else_is_refused(key, value):
    with pytest.raises(ValueError, match="random number generators"):
        set_random_state({**present_state(), key: value})


def test_another_number_of_ranks_starts_from_seeds_that_differ():
    draws = []
    for seed, step, rank in ((0, 4, 0), (0, 4, 0), (0, 4, 1), (0, 5, 0), (1, 4, 0)):
        seed_anew(seed, step, rank)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert len({str(item) for item in draws[1:]}) == 4
