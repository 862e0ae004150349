"""Plans of `sparseforge prune`: memory of a 14B model from its config alone, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseforge_ds.cli.main import main
from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig
from sparseforge_ds.extras.planner import prune_plan
from sparseforge_ds.extras.planner.machine import GIB
from sparseforge_ds.extras.planner.prune_plan import PrunePlan, plan_prune
from sparseforge_ds.model.architecture import bare_model
from tests.tiny_folders import BYTE_VOCABULARY, write_json, write_model, write_text
from tests.tiny_models import BUILDERS
from tests.unit.extras.planner.hub_configs import qwen3_14b

A_BLOCK = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 17408 * 5120
"""Weights of a decoder block of Qwen3-14B under a mask."""


def of_14b(tokens: int, gpu: str = "h100", mfu: float = 0.4, **start: Any) -> PrunePlan:
    config = qwen3_14b()
    shape = (tokens // 2048, 2048)
    settings = BlockStartConfig(**start)
    return plan_prune(bare_model(config), SparseForgeConfig(), settings, torch.bfloat16, shape, Path("out"), (gpu, mfu))


def test_14b_fits_into_24_gb() -> None:
    plan = of_14b(2**21)
    assert plan.peak < 15 * GIB and plan.fits and plan.work.blocks == 40
    training = plan.memory["training"]
    assert training["Adam's moments"] == 8 * A_BLOCK and training["block"] == pytest.approx(4 * A_BLOCK, rel=1e-3)
    assert plan.memory["first mask"]["second moments"] > 4 * (3 * 5120**2 + 17408**2)
    assert plan.work.streams == 2 * 2**21 * 5120 * 2 and plan.streams_in == "in memory or on the disk"
    assert of_14b(2**21, soft=0).memory["training"]["masks"] == 2 * A_BLOCK < training["masks"] - 11 * A_BLOCK
    # What is advised makes the largest phase smaller.
    cures = {"give --soft 0": {}, "or --mask magnitude": {"epochs": 0}, "memory": {"epochs": 0, "mask": "magnitude"}}
    for words, start in cures.items():
        verdict = dict(dataclasses.replace(of_14b(2**17, **start), available=1).lines())["verdict"]
        assert words in verdict and ("--mask magnitude" in verdict) == ("--mask" in words)
    alone = of_14b(2**17, epochs=0, mask="magnitude")
    assert "training" not in alone.memory and alone.peak < plan.peak and alone.streams_in == "on the GPU"


def test_blocks_that_are_done_take_two_passes_alone() -> None:
    config = qwen3_14b()
    model = bare_model(config)
    settings = BlockStartConfig()
    of_all, of_half, of_none = (
        plan_prune(
            model, SparseForgeConfig(), settings, torch.bfloat16, (1024, 2048), Path("out"), ("h100", 0.4), range(done)
        )
        for done in (0, 20, 40)
    )
    assert of_half.seconds["training"] == of_all.seconds["training"] / 2
    assert of_all.seconds["forward passes"] / 2 < of_half.seconds["forward passes"] < of_all.seconds["forward passes"]
    assert of_half.block_files == of_all.block_files / 2 and of_none.block_files == 0
    assert sum(of_none.seconds.values()) == 0, "nothing but the export is left"
    times = [dict(plan.lines())["time"] for plan in (of_all, of_half, of_none)]
    assert "for 40 blocks: " in times[0] and "for 20 of 40 blocks: " in times[1]
    assert times[2] == "0.0 minutes for 0 of 40 blocks: all of them are done"


def test_a_block_that_does_not_fit_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model", BUILDERS["llama"](vocab_size=BYTE_VOCABULARY))
    monkeypatch.setattr(prune_plan, "free_memory", lambda: 2**20)
    monkeypatch.setattr(prune_plan, "measured_rates", lambda *_: pytest.fail("a block was measured"))
    words = ["prune", str(folder), str(tmp_path / "out"), "--text", str(write_text(tmp_path / "text.jsonl", 4))]
    words += ["--tokens", "512", "--dry_run"]
    assert main([*words, "--seq_length", "32", "--device", "cpu"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1].startswith("verdict does not fit into 0.0 GiB")
    assert not any(line.startswith("time") for line in lines)


def test_flags_that_do_not_fit_a_plan_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = qwen3_14b(num_hidden_layers=2).to_dict()
    folder = write_json(tmp_path / "config.json", json.loads(json.dumps(content, default=str))).parent
    words = ["prune", str(folder), str(tmp_path / "out"), "--text", "text.jsonl"]
    for flags, message in {
        ("--gpu", "h100"): "--gpu h100: it belongs to --dry_run",
        ("--dry_run", "--mfu", "0.3"): "--mfu 0.3: it belongs to --gpu",
        ("--dry_run",): "--text text.jsonl: no such file; give a file of",
        ("--dry_run", "--gpu", "abacus"): "--gpu abacus: known are a100, h100",
        ("--dry_run", "--gpu", "h100", "--mfu", "2"): "--mfu 2.0: use a share",
        ("--dry_run", "--gpu", "h100", "--device", "cpu"): "--gpu h100 and --device cpu: give one",
        ("--dry_run", "--gpu", "h100", "--tokens", "100"): "--tokens 100: less than one sequence of 512",
        ("--dry_run", "--gpu", "h100", "--seq_length", "1"): "--seq_length 1: the model has",
        ("--dry_run", "--gpu", "h100", "--exclude", "nothing*"): "nothing*",
        ("--dry_run", "--gpu", "h100", "--soft", "-1"): "--soft -1.0 is not valid",
    }.items():
        assert main([*words, *flags]) == 2, flags
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, (flags, error)
