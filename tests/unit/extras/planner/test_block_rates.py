"""Time of a prune: of a 14B model by a data sheet, and by a block that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseforge_ds.cli.main import main
from tests.tiny_folders import BYTE_VOCABULARY, write_model
from tests.tiny_models import BUILDERS
from tests.unit.extras.planner.test_prune_plan import A_BLOCK, of_14b


def test_time_is_of_operations_tokens_and_the_share_of_the_peak() -> None:
    seconds = of_14b(2**21, soft=0).seconds
    # Six operations of a weight and a token for each epoch, and two for every pass forward.
    speed = 989e12 * 0.4
    assert seconds["training"] == pytest.approx(40 * 2**21 * 4 * 6 * A_BLOCK / speed, rel=0.06)
    # Soft masks take longer, in their share of the steps.
    assert 1.02 * seconds["training"] < of_14b(2**21).seconds["training"] < 1.1 * seconds["training"]
    # Fewer tokens take less time, and a GPU at half its speed takes longer.
    assert sum(of_14b(2**17, soft=0).seconds.values()) < sum(seconds.values()) / 8
    assert of_14b(2**21, mfu=0.2, soft=0).seconds["training"] == pytest.approx(2 * seconds["training"], rel=0.06)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_block_is_measured(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"vocab_size": BYTE_VOCABULARY, "bos_token_id": 256, "eos_token_id": 257}
    folder = write_model(tmp_path / "model", BUILDERS[family](**options).bfloat16())
    words = ["prune", str(folder), str(tmp_path / "out"), "--text", "stdlib:train", "--tokens", "512", "--dry_run"]
    assert main([*words, "--seq_length", "32", "--device", "cpu"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "text 512 tokens in sequences of 32, 64 steps of a sequence a block"
    assert any(line.startswith("time ") and "minutes for 2 blocks" in line for line in lines)
    assert any("by one block that was measured on this cpu with" in line for line in lines)
    assert lines[-1].startswith("verdict fits into") and not (tmp_path / "out").exists()
