"""A plan of a block-wise start: memory of its largest block, tokens, time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.extras.planner.memory import memory
from sparseforge_ds.extras.planner.start import start_flops, start_tokens
from tests.tiny_folders import deepspeed_json, write_json
from tests.unit.extras.planner.hub_configs import qwen3_14b
from tests.unit.extras.planner.test_memory import NOTHING, planned
from tests.unit.extras.planner.test_plan_command import plan

A_BLOCK = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 17408 * 5120
"""Weights of a decoder block of Qwen3-14B under a mask."""
of_blocks = partial(planned, 3, 8, config=partial(qwen3_14b, num_hidden_layers=4))


def phase(model: Any, laid_out: Any) -> dict[str, int]:
    return memory(model, laid_out, lambda *_: NOTHING).phases.get("start", {})


def test_a_start_is_planned_in_memory_tokens_and_operations() -> None:
    assert phase(*of_blocks({})) == {} and start_tokens(of_blocks({})[1]) == 0
    # A short run gives all its tokens, and a long one a share.
    for steps, tokens in ((100, 100 * 8 * 128), (1000, 131_072), (10_000, 0.05 * 10_000 * 8 * 128)):
        model, laid_out = of_blocks({"start": {}, "max_steps": steps})
        assert start_tokens(laid_out) == tokens
    result = phase(model, laid_out)
    assert result["a whole block"] == pytest.approx((21 + 12) * A_BLOCK, rel=0.001)
    fixed = phase(*of_blocks({"start": {"soft": 0}}))
    assert fixed["a whole block"] == pytest.approx(21 * A_BLOCK, rel=0.001)
    assert result["second moments"] > 4 * (3 * 5120**2 + 17408**2)
    # Every weight of a block forward and backward in its passes, five where eight ranks round a step up.
    forward = 2.0 * model.active
    blocks = 2 * (model.active - model.vocabulary * model.hidden)
    operations = start_flops(model, laid_out, forward) / start_tokens(laid_out)
    assert operations == forward + (4 + 3 * 5) * blocks
    assert "second moments" not in phase(*of_blocks({"start": {"mask": "wanda"}}))

    tokens = 4_000_000
    far = memory(*of_blocks({"start": {"tokens": tokens}}), lambda *_: NOTHING)
    assert far.host["start's streams"] == pytest.approx(tokens // 8 * 5120 * 2 * 2, rel=0.01)  # whole steps are read
    _, laid_out = of_blocks({"method": "naive_retrain", "importance": "sparsegpt"})
    assert start_tokens(laid_out) == 16 * 8 * 128
    assert start_flops(model, laid_out, forward) / start_tokens(laid_out) == forward + 4 * blocks


def test_a_plan_says_how_long_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = deepspeed_json(3, 8, method={"name": "sparseforge"}, start={"tokens": 65536}, max_steps=400)
    path = str(write_json(tmp_path / "ds.json", content))
    assert plan("--model", "stdlib_llama", "--gpus", "2", "--deepspeed", path) == 0
    text = capsys.readouterr().out
    # A step of one rank has a sequence, and one of two ranks two: both take as many steps.
    assert "a block-wise start, every block trained 8 times on 65,536 tokens" in text
    assert "+ start" in text and "minutes: 65,536 tokens, block by block" in text
