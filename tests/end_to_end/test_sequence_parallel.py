"""Sequences that ranks share: masks and weights of the run that divides none, and resumed from and to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_evaluation import scored
from tests.end_to_end.test_layouts import assert_same, flags, states, taken_back
from tests.end_to_end.test_train import train


def completions(path: Path) -> Path:
    """Records of which few tokens are trained on, some sequences having none in one half."""
    lines = ({"prompt": f"What is {i}? " * (i % 12 + 1), "completion": f"{i * i} " * (i % 3)} for i in range(200))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_ranks_that_share_sequences_train_as_undivided_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train on 2 x 1 and 2 x 2 ranks (of a sequence, of groups) at ZeRO-2 and 3, and go back to one rank."""
    block: dict[str, Any] = {"distillation": {"hidden": {"weight": 4.0}}}
    # Completions: ranks have different numbers of trained tokens. With a teacher and its hidden states.
    pairs = completions(tmp_path / "pairs.jsonl")
    text = {"dataset": pairs, "loss_on": "completion", "eval_dataset": pairs, "eval_sequences": 0, "eval_every": 4}
    undivided, two, four = (tmp_path / name for name in ("undivided", "two", "four"))
    train(*flags(tmp_path, block, 0, 4, undivided, **text), ranks=1)
    expected = states(undivided)
    # Two ranks that share sequences, and two pairs of them.
    shared = {**text, "sequence_parallel": 2}
    capsys.readouterr()
    train(*flags(tmp_path, block, 2, 4, two, **shared), "--activation_checkpointing", ranks=2)
    assert "4 a group x 3 accumulated x 1 group of 2 ranks that share sequences" in capsys.readouterr().out
    assert_same(two, expected)
    train(*flags(tmp_path, block, 3, 3, four, **shared), ranks=4)
    assert_same(four, expected)
    # Held-out text is scored alike.
    perplexity = scored(undivided)
    assert list(perplexity) == [0, 4, 8]
    for run in (two, four):
        assert scored(run) == pytest.approx(perplexity, rel=1e-6), run.name

    # From undivided to divided, and back, after step 3.
    divided = taken_back(undivided, 3, tmp_path / "divided")
    train(*flags(tmp_path, block, 3, 2, divided, **shared), "--resume", ranks=4)
    assert_same(divided, expected)
    joined = taken_back(four, 3, tmp_path / "joined")
    train(*flags(tmp_path, block, 1, 6, joined, **text), "--resume", ranks=1)
    assert_same(joined, expected)


PROBES: dict[str, tuple[int, dict[str, Any]]] = {
    "elements": (1, {"curvature": {"factored": False}}),
    "signs at outputs": (3, {"importance": "hutchinson", "curvature": {"radius": 0.3, "damping": 0.05}}),
    "mask of wanda": (0, {"method": "naive_retrain", "importance": "wanda", "curvature": {"first_probes": 2}}),
}
"""ZeRO stages and blocks whose random numbers, or starting masks, go by tokens."""


@pytest.mark.parametrize("name", PROBES)
def test_probes_draw_by_token(tmp_path: Path, name: str) -> None:
    stage, block = PROBES[name]
    train(*flags(tmp_path, block, 1, 6, tmp_path / "whole"), ranks=1)
    train(*flags(tmp_path, block, stage, 6, tmp_path / "parts", sequence_parallel=2), ranks=2)
    assert_same(tmp_path / "parts", states(tmp_path / "whole"))
