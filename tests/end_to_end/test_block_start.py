"""Runs with a block-wise start: any layout, resumed behind it, exported with proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.cli.main import main
from tests.end_to_end.test_layouts import STEPS, assert_same, flags, states, taken_back
from tests.end_to_end.test_train import flags_of, train
from tests.tiny_folders import deepspeed_json

BLOCK = {"method": {"hardening": [0, 0]}, "start": {"tokens": 4 * 12 * 32, "batch": 12, "epochs": 2}}


def test_any_layout_and_resumed_behind_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one_rank, three = tmp_path / "one", tmp_path / "three"
    train(*flags(tmp_path, BLOCK, 0, 4, one_rank), ranks=1)
    assert "start: 1,536 tokens, 8 steps of each of 2 blocks" in (output := "".join(capfd.readouterr()))
    assert "start: block 2 of 2, error 0." in output and "saved step_000000" in output
    train(*flags(tmp_path, BLOCK, 2, 4, three), "--activation_checkpointing", ranks=3)
    # Ranks add in another order, and what little gradient some weights have is rounding; masks are the same.
    assert_same(three, states(one_rank), bound=2e-3)
    parts = tmp_path / "parts"
    train(*flags(tmp_path, BLOCK, 1, 4, parts), "--sequence_parallel=2", ranks=2)
    assert_same(parts, states(one_rank), bound=2e-3)
    capfd.readouterr()
    resumed = taken_back(one_rank, 0, tmp_path / "resumed")
    train(*flags(tmp_path, BLOCK, 3, 2, resumed), "--resume", ranks=2)
    assert "start: block" not in "".join(capfd.readouterr())
    assert_same(resumed, states(one_rank), bound=1e-5)
    result, after_resume = (read_json_object(run / "result.json") for run in (one_rank, resumed))
    assert (result["start"]["tokens"], result["start"]["epochs"]) == (1536, 2) and result["path"] > 0
    assert all(result[key] == after_resume[key] for key in ("start", "path"))
    for name, checkpoint in (("end", resumed), ("start", one_rank / "checkpoints" / "step_000000")):
        assert main(["consolidate", str(checkpoint), str(tmp_path / name), "--model", str(tmp_path / "model")]) == 0


def test_masks_move_after_a_start_and_a_resumed_run_does_not_repeat_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moving = BLOCK | {"method": {"hardening": [0, 0.5], "update_every": 1}}
    run = tmp_path / "run"
    train(*flags(tmp_path, moving, 3, 2, run))
    log = "".join(capfd.readouterr())
    assert "every block trained 2 times on 1,536 tokens, then an update every 1 steps" in log
    assert "saved step_000000" in log
    resumed = taken_back(run, 0, tmp_path / "resumed")
    train(*flags(tmp_path, moving, 3, 2, resumed), "--resume")
    assert "start: block" not in "".join(capfd.readouterr())
    assert_same(resumed, states(run))
    # Masters of 16 bits leave a part of W outside the optimizer's state: the start is not saved, and the run goes on.
    bf16 = tmp_path / "bf16"
    alone = {"start": {"tokens": 4 * 12 * 32, "epochs": 1}}  # whose steps have one sequence on one rank
    content = deepspeed_json(1, batch=12, max_steps=STEPS, **(moving | alone))
    content["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    train(*flags_of(tmp_path, content, global_batch=12, micro_batch=2, save_every=3, output_dir=bf16))
    assert "saved step_000000" not in (log := "".join(capfd.readouterr()))
    # Two ranks read two sequences a step, and take as many steps as one rank.
    assert "every block trained 2 times on 1,536 tokens" in log
    assert "start: 1,536 tokens, 48 steps of each of 2 blocks" in log
    assert read_json_object(bf16 / "result.json")["start"]["epochs"] == 2
    assert not (bf16 / "checkpoints" / "step_000000").exists()
