from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.export import bits, patterns_found
from sparseforge_ds.export.patterns_found import PATTERNS, MatrixFound, find_patterns
from sparseforge_ds.mask.pattern import NM, Block, Pattern, top_n
from tests.tiny_models import tiny_gpt2, tiny_llama


def pruned(weight: Tensor, pattern: Pattern, axis: int) -> Tensor:
    shape = tuple(weight.shape)
    group_GM = pattern.to_groups(weight.reshape(-1), shape, axis)
    value_GM = torch.where(top_n(group_GM.abs(), pattern.kept), group_GM, 0.0)
    return pattern.from_groups(value_GM, shape, axis).view(shape).contiguous()


def look_at(weight: Tensor, name: str) -> MatrixFound:
    shape = tuple(weight.shape)
    return patterns_found.look_at(weight.reshape(-1).split(patterns_found._band(shape)), shape, name)


@pytest.mark.parametrize("shape", [(64, 96), (3, 32, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_pattern_that_was_put_in_is_found(
    pattern: Pattern, axis: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight = pruned(torch.randn(shape) + 3.0 * torch.randn(shape).sign(), pattern, axis).to(dtype)
    found = look_at(weight, "w").held[0]
    assert found.pattern == pattern
    assert found.axis == (axis if isinstance(pattern, NM) else -1)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_what_is_held_against_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (int(n) for n in torch.randint(1, 7, (2,), generator=generator) * 8)
    share = torch.rand((), generator=generator) ** 3
    weight = (torch.rand(rows, columns, generator=generator) < share).float()
    expected = set()
    for pattern in PATTERNS:
        if isinstance(pattern, Block):
            tiles = [weight[i : i + 16, j : j + 16] for i in range(0, rows, 16) for j in range(0, columns, 16)]
            if rows % 16 == columns % 16 == 0 and all(int(tile.sum()) <= 128 for tile in tiles):
                expected.add(str(pattern))
            continue
        for axis, lines in ((-1, weight), (-2, weight.T)):
            groups = [line[i : i + pattern.m] for line in lines for i in range(0, line.numel(), pattern.m)]
            if all(int(group.sum()) <= pattern.n for group in groups):
                expected.add(f"{pattern} along axis {axis}")
    found = look_at(weight, "w")
    assert {str(held) for held in found.held} == expected
    assert found.zero == (not weight.any())


def test_dense_odd_and_empty_matrices() -> None:
    assert str(look_at(torch.randn(32, 32), "w")) == "dense"
    assert str(look_at(torch.randn(7, 9), "w")) == "dense"
    assert str(look_at(torch.zeros(8, 8), "w")) == "zero"
    assert str(look_at(torch.full((8, 8), -0.0), "w")) == "zero"
    assert str(look_at(torch.zeros(0, 8), "w")) == "zero"


def test_one_group_at_the_very_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "CHUNK", 256)
    weight = pruned(torch.randn(64, 32), NM(2, 4), -1)
    assert str(look_at(weight, "w")) == "2:4 along axis -1"
    weight[-1, -4:] = 1.0
    assert NM(2, 4) not in [held.pattern for held in look_at(weight, "w").held]


def test_a_dense_model_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--json", str(tmp_path / "report")]) == 1
    out = capsys.readouterr().out
    assert "in layers: 14 dense" in out and out.endswith("NOT OK\n")
    report = json.loads((tmp_path / "report").read_text())
    assert report["ok"] is False and report["pattern"] is None and len(report["matrices"]) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_of_an_unknown_family_in_shards(
    tmp_path: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_gpt2().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".h." in name and parameter.ndim == 2:
                parameter.copy_(pruned(parameter, NM(2, 4), -2))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    assert str(find_patterns(tmp_path, workers=2).common) == "2:4 along axis -2"
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path), "--pattern", "2:4"]) == 0
    assert main(["verify", str(tmp_path), "--pattern", "1:4"]) == 1
    capsys.readouterr()
    assert main(["verify", str(tmp_path), "--pattern", "2:10"]) == 1  # of 32 inputs
    assert "missing: transformer.h.0.attn.c_attn.weight (its input axis has 96 elements" in capsys.readouterr().out


def test_one_dense_layer_is_enough_to_fail(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name and "layers.1.mlp.up_proj" not in name:
                parameter.copy_(pruned(parameter, NM(2, 4), -1))
    model.save_pretrained(tmp_path)
    found = find_patterns(tmp_path)
    assert found.common is None and sum(str(m) == "dense" and m.in_layer for m in found.matrices) == 1


def test_a_dense_matrix_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(bits, "CHUNK", 512)
    read: list[int] = []
    original = TensorFolder.stream

    def counting(self: TensorFolder, name: str, elements: int) -> Iterator[Tensor]:
        for piece in original(self, name, elements):
            read.append(piece.numel())
            yield piece

    monkeypatch.setattr(TensorFolder, "stream", counting)
    assert find_patterns(tmp_path).common is None
    assert sum(read) == 14 * 512 + 2 * 1024 < sum(p.numel() for p in model.parameters() if p.ndim == 2) / 2


def test_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    assert "config.json: not a readable JSON file" in capsys.readouterr().err
