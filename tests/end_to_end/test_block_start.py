"""Runs that begin from a start that is trained block by block: any layout, resumed behind it, exported with proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseforge_ds.cli.main import main
from tests.end_to_end.test_layouts import assert_same, flags, states, taken_back
from tests.end_to_end.test_train import train

BLOCK = {"method": {"hardening": [0, 0]}, "start": {"tokens": 4 * 12 * 32, "batch": 12, "epochs": 2}}


def test_any_layout_and_resumed_behind_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, three = tmp_path / "one", tmp_path / "three"
    train(*flags(tmp_path, BLOCK, 0, 4, one), ranks=1)
    assert "start: 1,536 tokens, 8 steps of each of 2 blocks" in (said := "".join(capfd.readouterr()))
    assert "start: block 2 of 2, error 0." in said and "saved step_000000" in said
    train(*flags(tmp_path, BLOCK, 2, 4, three), "--activation_checkpointing", ranks=3)
    # Ranks add in another order, and what little gradient some weights have is rounding; masks are the same.
    assert_same(three, states(one), bound=2e-3)
    parts = tmp_path / "parts"
    train(*flags(tmp_path, BLOCK, 1, 4, parts), "--sequence_parallel=2", ranks=2)
    assert_same(parts, states(one), bound=2e-3)
    capfd.readouterr()
    resumed = taken_back(one, 0, tmp_path / "resumed")
    train(*flags(tmp_path, BLOCK, 3, 2, resumed), "--resume", ranks=2)
    assert "start: block" not in "".join(capfd.readouterr())
    assert_same(resumed, states(one), bound=1e-5)
    for name, checkpoint in (("end", resumed), ("start", one / "checkpoints" / "step_000000")):
        assert main(["consolidate", str(checkpoint), str(tmp_path / name), "--model", str(tmp_path / "model")]) == 0
