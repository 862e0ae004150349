"""Folders of which nothing says what their pattern is: all matrices of layers must be in the one that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparseforge_ds.cli.main import main
from sparseforge_ds.export import counting
from sparseforge_ds.export.verification import FolderReport, check_folder
from sparseforge_ds.mask.pattern import NM, Block, Pattern, top_n
from tests.tiny_folders import deepspeed_json, write_json, write_model, write_text
from tests.tiny_models import tiny_llama


def pruned(weight: Tensor, pattern: Pattern, axis: int) -> Tensor:
    shape = tuple(weight.shape)
    group_GM = pattern.to_groups(weight.reshape(-1), shape, axis)
    value_GM = torch.where(top_n(group_GM.abs(), pattern.kept_count), group_GM, 0.0)
    return pattern.from_groups(value_GM, shape, axis).view(shape).contiguous()


def check(folder: Path, *weights: Tensor, pattern: Pattern | None = None) -> FolderReport:
    """Return the report of a folder of an unknown family with one matrix in each layer."""
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    tensors = {f"layers.{i}.w": weight for i, weight in enumerate(weights)} | {"embedding": torch.randn(8, 8)}
    save_file(tensors, folder / "model.safetensors")
    return check_folder(folder, pattern)


@pytest.mark.parametrize("shape", [(64, 96), (3, 32, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("pattern", [NM(2, 4), NM(4, 8), Block(16)], ids=str)
def test_the_pattern_that_was_put_in_is_found(
    pattern: Pattern, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    weight = pruned(torch.randn(shape) + 3.0 * torch.randn(shape).sign(), pattern, -1).to(dtype)
    weight = weight + 0.0 if dtype != torch.float8_e4m3fn else weight.float().add(0.0).to(dtype)
    report = check(tmp_path, weight, pattern=pattern)
    assert report.ok and report.pattern == str(pattern)
    assert not check(tmp_path, weight, torch.ones(32, 32, dtype=dtype), pattern=pattern).ok


def test_a_violation_in_the_last_group_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "CHUNK", 256)
    weight = pruned(torch.randn(64, 32), NM(2, 4), -1) + 0.0
    assert check(tmp_path, weight).ok and check(tmp_path, weight).pattern == "2:4"
    weight[-1, -4:] = 1.0
    report = check(tmp_path, weight)
    assert not report.ok and report.violations == 1


def test_globs_of_dense_weights_match_matrices(tmp_path: Path) -> None:
    weight = pruned(torch.randn(64, 32), NM(2, 4), -1) + 0.0
    assert not check(tmp_path, weight, torch.ones(8, 8)).ok
    assert check_folder(tmp_path, exclude=["*.1.w"]).ok
    for glob in ("*.2.w", "embedding"):
        with pytest.raises(ValueError, match=f"sparseforge.exclude: '.*{glob[-2:]}' matches no weight"):
            check_folder(tmp_path, exclude=[glob])
    nothing = check_folder(tmp_path, exclude=["*"])
    assert not nothing.ok and nothing.notes == ["there is no weight to check"]


def test_a_shape_that_no_pattern_fits_is_reported(tmp_path: Path) -> None:
    report = check(tmp_path, torch.zeros(7, 9))
    assert not report.ok and report.missing[0].startswith("layers.0.w (")


def test_a_dense_model_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    assert main(["verify", str(tmp_path / "model"), "--json", str(tmp_path / "report")]) == 1
    assert capsys.readouterr().out.endswith("NOT OK\n")
    report = json.loads((tmp_path / "report").read_text())
    assert report["ok"] is False and report["violations"] > 0 and len(report["rows"]) == 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_of_an_unknown_family_in_shards_is_verified(
    tmp_path: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.ndim == 2:
                parameter.copy_(pruned(parameter, NM(2, 4), -1))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    assert check_folder(tmp_path, workers=2).pattern == "2:4"
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path), "--pattern", "2:4"]) == 0
    assert main(["verify", str(tmp_path), "--pattern", "1:4"]) == 1
    capsys.readouterr()
    assert main(["verify", str(tmp_path), "--pattern", "2:10"]) == 1  # of 32 inputs
    assert "missing: model.layers.0.self_attn.q_proj.weight (its input axis has " in capsys.readouterr().out


def test_one_dense_layer_is_enough_to_fail(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name and "layers.1.mlp.up_proj" not in name:
                parameter.copy_(pruned(parameter, NM(2, 4), -1))
    model.save_pretrained(tmp_path)
    report = check_folder(tmp_path)
    assert [row.name for row in report.rows if row.violations] == ["model.layers.1.mlp.up_proj.weight"]


def test_a_folder_without_a_config_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    assert "has no config.json, so it is no model" in capsys.readouterr().err


def test_pickled_weights_are_refused_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read the folder by every command; each names the fault and the cure."""
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    text = write_text(tmp_path / "text.jsonl")
    message = (
        "no model.safetensors.index.json in it, but pytorch_model.bin, which is not read here: weights are read from"
    )
    train = ["train", "--deepspeed", str(write_json(tmp_path / "ds.json", deepspeed_json(batch=8))), "--dry_run"]
    flags = {"model": model, "dataset": text, "output_dir": tmp_path / "run", "seq_length": 32}
    for command in (
        ["verify", str(model)],
        ["export", str(model), str(tmp_path / "out")],
        ["permute", str(model), str(tmp_path / "out")],
        [*train, *(f"--{name}={value}" for name, value in flags.items())],
    ):
        assert main(command) in (1, 2)
        assert message in capsys.readouterr().err
    # Also where they are divided.
    (model / "pytorch_model.bin").rename(model / "pytorch_model-00001-of-00002.bin")
    assert main(["export", str(model), str(tmp_path / "out")]) == 2
    assert "but pytorch_model-00001-of-00002.bin, which is not read here" in capsys.readouterr().err
    (model / "pytorch_model-00001-of-00002.bin").rename(model / "consolidated.00.pth")
    (model / "model.Q4_K_M.gguf").touch()
    assert main(["verify", str(model)]) == 2
    assert "but consolidated.00.pth and 1 more, which is not read here" in capsys.readouterr().err
