"""benchmarks/rounded_weights.py on a tiny model, and the bits that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks import rounded_weights
from tests.tiny_folders import BYTE_VOCABULARY, write_model
from tests.tiny_models import BUILDERS


def test_a_row_has_as_many_values_as_its_bits_allow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = write_model(tmp_path / "dense", BUILDERS["llama"](vocab_size=BYTE_VOCABULARY))
    rounded_weights.main([str(dense), str(tmp_path / "rounded"), "--bits", "2"])
    assert "weights rounded" in capsys.readouterr().out
    weight = load_file(tmp_path / "rounded" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert weight.isfinite().all() and weight.any()
    assert all(len(row.unique()) <= 3 for row in weight)


@pytest.mark.parametrize("bits", ["1", "9"])
def test_bits_without_a_grid_are_refused(tmp_path: Path, bits: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit has no value but zero, whose scale is NaN."""
    with pytest.raises(SystemExit, match="2"):
        rounded_weights.main(["model", str(tmp_path / "out"), "--bits", bits])
    assert f"argument --bits: invalid choice: {bits}" in capsys.readouterr().err
