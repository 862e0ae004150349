"""`benchmarks/device_cost.py` on a small model: what is known beforehand comes out, and the same every time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fake_cuda import shim
from tests.distributed import PATIENCE, ROOT

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
WEIGHTS = (4 * 512 * 512 + 3 * 512 * 1024) // 4

pytestmark = pytest.mark.skipif(shim.missing_compiler() is not None, reason=str(shim.missing_compiler()))


def counted(folder: Path) -> tuple[dict[str, Any], str]:
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    command = [sys.executable, "benchmarks/device_cost.py", "--model", str(folder), "--ranks", "4", "--tokens", "64"]
    process = subprocess.run(
        [*command, "--json", str(folder / "counts.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads((folder / "counts.json").read_text(encoding="utf-8")), process.stdout


def test_each_phase_moves_the_bytes_that_are_known_beforehand(tmp_path: Path) -> None:
    result, printed = counted(tmp_path)
    assert (result["weights"], result["matrices"]) == (WEIGHTS, 7)
    shipped = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())["zero_optimization"]
    assert result["setting"]["sub_group_size"] == shipped["sub_group_size"]
    phases = result["phases"]
    assert "calculated" in printed and all(name in printed for name in phases)
    # AdamW reads weight, gradient and two moments, and writes all but the gradient: 28 bytes a weight.
    for name in ("soft step, hardening", "frozen step"):
        adam = phases[name]["places"]["elsewhere"]
        assert 28 * WEIGHTS <= adam < 28.01 * WEIGHTS, (name, adam / WEIGHTS)
        assert not phases[name]["syncs"] and not phases[name]["faults"]
    moved = phases["frozen step"]["read"] + phases["frozen step"]["written"]
    assert 32 * WEIGHTS <= moved <= 32.2 * WEIGHTS
    assert phases["frozen step"]["held"] >= 8 * WEIGHTS  # the two moments at least
    # Nothing is done to gradients in a frozen pass; once a step they are read and written, 2 bytes each and a bit.
    assert phases["frozen gradient hooks beside the passes"]["kernels"] == 0
    # The hooks on layers take two kernels a matrix. They read 64 tokens in bf16: every output gradient twice, every
    # input once, and the four inputs that a layer does not share with the one before once more.
    heard = phases["curvature hooks beside the passes"]
    assert heard["kernels"] == 2 * 7
    features = 2 * (5 * 512 + 2 * 1024) + (6 * 512 + 1024) + (3 * 512 + 1024)
    assert 2 * 64 * features < heard["read"] < 1.2 * 2 * 64 * features and heard["written"] > 0
    # Two logits of bf16 at least exist at a time, unless they are formed by chunks of tokens.
    assert 0 < phases["loss"]["peak"] < 100 * 64 * CONFIG["vocab_size"]
    # An update has as many kernels for any number of matrices. It reads W twice, codes and the old choice; it writes
    # codes, choices and the master, which is then read and cast. Sums of rows and columns are large in a small model.
    update = phases["mask update"]
    assert update["kernels"] <= 60
    assert 22.3 * WEIGHTS < update["read"] + update["written"] < 26 * WEIGHTS
    assert sum(update["collectives"].values()) > 0
