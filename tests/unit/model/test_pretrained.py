"""Models whose config.json and weights do not belong together, or cannot be trained: said before a weight is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.cli.main import main
from sparseforge_ds.model.architecture import bare_model
from sparseforge_ds.model.pretrained import Pretrained, check_shapes, find_model
from tests.tiny_folders import deepspeed_json, write_json, write_model, write_text
from tests.tiny_models import BUILDERS


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense") / "model")


@pytest.mark.parametrize("family", BUILDERS)
def test_what_transformers_saved_has_the_shapes_of_its_config(family: str, tmp_path: Path) -> None:
    model = BUILDERS[family]()
    model.save_pretrained(tmp_path)
    result = find_model(str(tmp_path), "--model")
    check_shapes(result, "--model", bare_model(result.config))
    result.config.get_text_config().vocab_size += 1
    with pytest.raises(
        ValueError, match=r"--model .*: (\S+) has the shape \(.*\) in the files, and by config.json \(.*\)"
    ):
        check_shapes(result, "--model", bare_model(result.config))


def test_config_and_weights_of_different_shapes_are_refused(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Student and teacher, in a dry run and in a run."""
    other = Path(shutil.copytree(dense, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    write_json(other / "config.json", {**config, "num_key_value_heads": 4})
    block = write_json(tmp_path / "ds.json", deepspeed_json(0))
    common = ["--deepspeed", str(block), "--dataset", str(write_text(tmp_path / "text.jsonl")), "--seq_length", "32"]
    message = "layers.0.self_attn.k_proj.weight has the shape (16, 32) in the files, and by config.json (32, 32)"
    for models in (["--model", str(other)], ["--model", str(dense), "--teacher", str(other)]):
        assert main(["train", *common, *models, "--output_dir", str(tmp_path / "run"), "--dry_run"]) == 1
        errors = capsys.readouterr().err
        assert errors.startswith(f"error: {models[-2]} {other}: ") and message in errors and errors.count("\n") == 1


VALUES = {
    "hidden_size": (0, "hidden_size is 0; it must be 1 or more"),
    "vocab_size": (-1, "vocab_size is -1"),
    "num_attention_heads": (0, "num_attention_heads is 0"),
    "num_hidden_layers": (10**9, "num_hidden_layers is 1000000000, and no model has more than 4096"),
    "num_local_experts": (10**9, "num_local_experts is 1000000000"),
    "quantization_config": ({"quant_method": "gptq", "bits": 4}, "its weights are quantized (gptq), which cannot"),
}


@pytest.mark.parametrize("key", VALUES)
def test_values_of_a_config_that_no_model_has(
    dense: Path, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse them at once in every command that reads a config."""
    value, message = VALUES[key]
    other = Path(shutil.copytree(dense, tmp_path / "other"))
    write_json(other / "config.json", {**json.loads((other / "config.json").read_text()), key: value})
    with pytest.raises(ValueError, match="^--model") as refused:
        bare_model(find_model(str(other), "--model").config)
    assert message in str(refused.value)
    assert main(["generate", str(other), "Once"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and (key in errors or "gptq" in errors.lower()), errors


def test_widths_are_no_counts_of_experts_or_layers(dense: Path, tmp_path: Path) -> None:
    """Doge counts 16,384 experts by default in models that have none, and a width of experts may be as large."""
    other = Path(shutil.copytree(dense, tmp_path / "other"))
    content: dict[str, Any] = json.loads((other / "config.json").read_text())
    more = {"num_experts": 16384, "is_moe": False, "shared_experts_intermediate_size": 32768, "experts_dim": 32768}
    write_json(other / "config.json", {**content, **more})
    assert find_model(str(other), "--model").config.shared_experts_intermediate_size == 32768


def test_a_config_in_which_a_quantization_is_no_object(dense: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(dense, tmp_path / "other"))
    content: dict[str, Any] = json.loads((other / "config.json").read_text())
    for odd in (5, ["gptq"], "gptq"):
        write_json(other / "config.json", {**content, "quantization_config": odd})
        with pytest.raises(ValueError, match=r"^--model .*config\.json"):
            find_model(str(other), "--model")


def test_a_folder_without_weights_has_no_shapes(dense: Path, tmp_path: Path) -> None:
    result = find_model(str(dense), "--model")
    bare = Pretrained("elsewhere", tmp_path, result.config)
    check_shapes(bare, "--model", bare_model(result.config))
