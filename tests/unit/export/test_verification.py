from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparseforge_ds.checkpoint.tensors import TensorFolder, hash_tensor
from sparseforge_ds.cli.main import main
from sparseforge_ds.export import counting, verification
from sparseforge_ds.export.counting import WeightReport, chunk_size
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.mask.pattern import NM, Block, top_n
from sparseforge_ds.model.stored_config import config_sha256
from tests.sparse_folders import write_dense
from tests.tiny_models import tiny_gpt2, tiny_llama

DOWN = "model.layers.0.mlp.down_proj.weight"


def project(weight: Tensor, pattern: NM | Block, input_axis: int) -> Tensor:
    shape = tuple(weight.shape)
    group_GM = pattern.to_groups(weight.reshape(-1), shape, input_axis)
    kept_GM = torch.where(top_n(group_GM.abs(), pattern.kept_count), group_GM, torch.zeros_like(group_GM))
    return pattern.from_groups(kept_GM, shape, input_axis).view(shape).contiguous()


def check_weight(weight: Tensor, name: str, pattern: NM | Block, input_axis: int) -> WeightReport:
    report = WeightReport(name, tuple(weight.shape), input_axis)
    for chunk in weight.reshape(-1).split(chunk_size(pattern.period(report.shape, input_axis))):
        report.add(chunk, pattern)
    return report


def is_prunable(name: str) -> bool:
    return "_proj.weight" in name or ".c_" in name and name.endswith("weight")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a 2:4 Llama as transformers saves it, with a sparsity.json."""
    model = tiny_llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_prunable(name):
                parameter.copy_(project(parameter, NM(2, 4), -1))
    model.save_pretrained(tmp_path / "model")
    rows = {name: {"sha256": hash_tensor(p.detach())} for name, p in model.state_dict().items()}
    sparsity = {
        "pattern": "2:4",
        "config": {"exclude": []},
        "weights": {name: {**row, "input_axis": -1} for name, row in rows.items() if is_prunable(name)},
        "dense": {name: row for name, row in rows.items() if not is_prunable(name)},
    }
    (tmp_path / "model" / "sparsity.json").write_text(json.dumps(sparsity))
    return tmp_path / "model"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any], keep_hashes: bool = False) -> None:
    """Change tensors on disk, and by default the recorded hashes with them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "sparsity.json"
    if path.exists() and not keep_hashes:
        sparsity = json.loads(path.read_text())
        for section in ("weights", "dense"):
            for name, entry in sparsity[section].items():
                if name in tensors:
                    entry["sha256"] = hash_tensor(tensors[name])
        path.write_text(json.dumps(sparsity))


def update(path: Path, change: dict[str, Any]) -> dict[str, Any]:
    """Change keys of a JSON file, and return what it holds then."""
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps(content))
    return content


def test_a_good_folder_verifies(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--json", str(tmp_path / "report.json")]) == 0
    out = capsys.readouterr().out
    assert DOWN in out and "14 weights" in out and "0 violations" in out and out.endswith("OK\n")
    report = json.loads((tmp_path / "report.json").read_text())
    elements = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    assert report["ok"] and report["violations"] == 0 and report["weights"] == 14
    assert report["groups"] == elements // 4 and report["nonzeros"] == elements // 2


def test_the_pattern_flag_replaces_sparsity_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sparsity.json").unlink()
    assert main(["verify", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\n2:4: 14 weights" in out and "0 violations\nsize: " in out and out.endswith("\nOK\n")
    assert main(["verify", str(folder), "--pattern", "2:4"]) == 0
    assert main(["verify", str(folder), "--pattern", "4:8"]) == 0
    assert main(["verify", str(folder), "--pattern", "1:4"]) == 1
    assert main(["verify", str(folder), "--pattern", "2:5"]) == 2


def test_one_violation_in_one_group_is_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN][3, 8:12] = 1.0

    edit(folder, spoil)
    report = check_folder(folder)
    assert [(row.name, row.violations) for row in report.rows if row.violations] == [(DOWN, 1)]
    assert main(["verify", str(folder)]) == 1
    assert capsys.readouterr().out.endswith("NOT OK\n")


@pytest.mark.parametrize("workers", ["1", "3"])
def test_each_weight_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    read: list[str] = []
    original = TensorFolder.stream

    def counting(self: TensorFolder, name: str, elements: int) -> Iterator[Tensor]:
        read.append(name)
        return original(self, name, elements)

    monkeypatch.setattr(TensorFolder, "stream", counting)
    assert main(["verify", str(folder), "--workers", workers]) == 0
    assert sorted(read) == sorted(load_file(folder / "model.safetensors"))


def test_pieces_of_a_weight_count_as_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = check_folder(folder)
    monkeypatch.setattr(counting, "CHUNK", 100)
    assert full.ok and check_folder(folder) == full


@pytest.mark.parametrize(
    ("value", "field"), [(-0.0, "negative_zeros"), (float("nan"), "nonfinite"), (float("inf"), "nonfinite")]
)
def test_negative_zeros_and_non_finite_values_are_counted(folder: Path, value: float, field: str) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN][0, :4] = 0.0
        tensors[DOWN][0, 1] = value

    edit(folder, spoil)
    report = check_folder(folder)
    assert not report.ok and report.violations == 0
    assert [(row.name, getattr(row, field)) for row in report.rows if getattr(row, field)] == [(DOWN, 1)]
    assert main(["verify", str(folder)]) == 1
    # Other tools leave -0.0 behind, which is a zero like any other.
    (folder / "sparsity.json").unlink()
    assert check_folder(folder).ok == (field == "negative_zeros")


def test_a_missing_weight_is_reported(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop(DOWN))
    assert check_folder(folder).missing == [DOWN]
    assert main(["verify", str(folder)]) == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool], ids=str)
def test_a_weight_that_is_no_float_does_not_verify(
    folder: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse zeros in the pattern that whatever loads the weight casts in silence."""
    (folder / "sparsity.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {DOWN: tensors[DOWN].sign().to(dtype)}, folder / "model.safetensors")
    assert main(["verify", str(folder)]) == 1
    output = capsys.readouterr().out
    assert f"missing: {DOWN} (stored as {dtype}, and weights are floating point)" in output
    with pytest.raises(ValueError, match=re.escape(f"{DOWN} (stored as {dtype}")):
        open_source(folder)


def test_changed_bytes_are_reported(folder: Path) -> None:
    edit(folder, lambda tensors: tensors["model.norm.weight"].add_(1), keep_hashes=True)
    assert check_folder(folder).changed == ["model.norm.weight"]
    assert main(["verify", str(folder)]) == 1


def test_a_tensor_that_sparsity_json_does_not_know(folder: Path) -> None:
    """Refuse a head beside tied embeddings, which is another model to transformers."""
    edit(folder, lambda tensors: tensors.update({"more.weight": torch.zeros(4)}))
    assert check_folder(folder).changed == ["more.weight, which sparsity.json does not list"]


def test_a_report_that_cannot_be_written_is_refused_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--json", str(folder / "nowhere" / "report.json")]) == 2
    output = capsys.readouterr()
    assert not output.out and "nowhere/report.json: cannot be written" in output.err


def test_a_weight_that_sparsity_json_forgot_is_still_checked(folder: Path) -> None:
    sparsity = json.loads((folder / "sparsity.json").read_text())
    del sparsity["weights"][DOWN]
    (folder / "sparsity.json").write_text(json.dumps(sparsity))
    edit(folder, lambda tensors: tensors[DOWN].fill_(1.0))
    assert check_folder(folder).violations == 32 * 64 // 4
    sparsity["config"]["exclude"] = ["*.down_proj.weight"]
    del sparsity["weights"][DOWN.replace("0", "1")]
    (folder / "sparsity.json").write_text(json.dumps(sparsity))
    assert check_folder(folder).violations == 0


def test_quantization_config_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["verify", str(folder)]) == 1
    assert "quantization_config" in check_folder(folder).notes[0]


@pytest.mark.parametrize(
    ("file", "change", "note"),
    [
        (
            "config.json",
            {"rms_norm_eps": 0.5},
            "config.json is not the exported one: the weights may be those of anoth",
        ),
        ("config.json", {"dtype": "bfloat16"}, "config.json gives another dtype than the weights have"),
        ("sparsity.json", {"values": "int8"}, "config.json says values and group_size (None, None), and sparsity.json"),
    ],
)
def test_a_config_that_sparsity_json_was_not_written_with_does_not_verify(
    folder: Path, file: str, change: dict[str, Any], note: str
) -> None:
    update(folder / "sparsity.json", {"config_sha256": config_sha256(update(folder / "config.json", {}))})
    update(folder / "sparsity.json", {"dtype": "float32"})
    assert check_folder(folder).ok
    update(folder / file, change)
    report = check_folder(folder)
    assert not report.ok and [text.startswith(note) for text in report.notes] == [True]


@pytest.mark.parametrize("foreign", [True, False])
def test_an_adapter_that_nothing_records_is_no_part_of_the_model(folder: Path, foreign: bool) -> None:
    """transformers would load it with the weights, by itself."""
    if foreign:
        (folder / "sparsity.json").unlink()
    assert check_folder(folder).ok
    (folder / "adapter_config.json").write_text("{}")
    report = check_folder(folder)
    assert not report.ok and "has a PEFT adapter beside its weights" in report.notes[0]
    assert "merge it into the weights" in report.notes[0]


def test_without_hashes_every_tensor_is_looked_at(folder: Path) -> None:
    (folder / "sparsity.json").unlink()

    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
            tensors[name][3] = torch.nan

    edit(folder, spoil)
    notes = check_folder(folder).notes
    assert notes == ["model.layers.1.input_layernorm.weight and 1 more are not finite; give a sound model"]


def test_without_a_record_the_model_of_config_json_says_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Build the model of a folder without `sparsity.json` alone, as that file lists what an export has."""
    with monkeypatch.context() as patched:
        patched.setattr(verification, "build_model", lambda _: pytest.fail("a model was built"))
        assert check_folder(folder).ok
    (folder / "sparsity.json").unlink()
    assert check_folder(folder).ok
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    message = "missing, which the model of config.json needs; download or save it again"
    assert check_folder(folder).notes == [f"model.norm.weight is {message}"]
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name])
    report = check_folder(folder)
    assert not report.ok and report.notes == [f"model.layers.1.self_attn.q_proj.weight and 9 more are {message}"]
    with pytest.raises(ValueError, match=r"q_proj\.weight and 9 more are missing, .*; run `sparseforge verify"):
        open_source(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    (note,) = check_folder(folder).notes
    assert (
        " has the shape (64, 32) in the files, and by config.json (65, 32); " in note
        and "put back the config.json" in note
    )
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": "many"}))
    assert check_folder(folder).notes[0].startswith("the model of config.json cannot be built to see what is missing: ")
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    assert check_folder(folder).ok


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen3_moe", "gpt_oss"])
def test_nothing_is_missing_in_what_transformers_saves(tmp_path: Path, family: str) -> None:
    """Ties, names of one tensor an expert, and the names without that of the inner model."""
    write_dense(tmp_path, family)
    assert check_folder(tmp_path).notes == []
    stored = load_file(tmp_path / "model.safetensors")
    if family == "qwen3_moe":
        name = next(name for name in stored if ".experts.1." in name)
        save_file({key: value for key, value in stored.items() if key != name}, tmp_path / "model.safetensors")
        assert check_folder(tmp_path).notes[0].startswith(f"{name} is missing")
    inner = "transformer." if family == "gpt2" else "model."
    save_file({name.removeprefix(inner): value for name, value in stored.items()}, tmp_path / "model.safetensors")
    assert check_folder(tmp_path).notes == []


def test_unreadable_folders_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    assert main(["verify", str(folder)]) == 2
    assert "model.safetensors: not a readable safetensors file" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(content)
    (folder / "sparsity.json").write_text("{")
    assert main(["verify", str(folder)]) == 2
    (folder / "sparsity.json").write_text('{"pattern": "2:4", "weights": [1]}')
    assert main(["verify", str(folder)]) == 2
    assert "weights is damaged" in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert main(["verify", str(folder)]) == 2


def test_conv1d_groups_run_along_the_first_axis(tmp_path: Path) -> None:
    model = tiny_gpt2()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_prunable(name):
                parameter.copy_(project(parameter, NM(2, 4), -2))
    model.save_pretrained(tmp_path)
    report = check_folder(tmp_path, NM(2, 4))
    assert report.ok and len(report.rows) == 8


def test_counts_of_a_small_weight_are_right() -> None:
    weight = torch.tensor([[1.0, 0.0, 2.0, 3.0, -0.0, 0.0, 0.0, 1.0]])
    report = check_weight(weight, "w", NM(2, 4), -1)
    assert (report.groups, report.nonzeros, report.violations, report.negative_zeros) == (2, 4, 1, 1)
    tile = torch.zeros(16, 16)
    tile.view(-1)[:128] = 1.0
    assert check_weight(tile, "w", Block(16), -1).violations == 0
    tile.view(-1)[128] = 1.0
    assert check_weight(tile, "w", Block(16), -1).violations == 1


@given(st.integers(0, 10**6), st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=60, deadline=None)
def test_counts_agree_with_loops(seed: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (16 * int(n) for n in torch.randint(1, 4, (2,), generator=generator))
    # Values that are easy to miscount: zeros of both signs, subnormals, infinities and NaN.
    values = torch.tensor([0.0, 0.0, -0.0, 1.0, -2.5, 6e-8, float("inf"), float("-inf"), float("nan")])
    indices = torch.randint(
        0, int(torch.randint(2, 10, (1,), generator=generator)), (rows, columns), generator=generator
    )
    weight = values[indices].to(getattr(torch, dtype))
    for pattern in (NM(2, 4), NM(1, 2), NM(4, 8), NM(3, 16), NM(1, 4), Block(16)):
        for axis in (-1, -2):
            report = check_weight(weight, "w", pattern, axis)
            # The groups, cut by slicing.
            if isinstance(pattern, Block):
                groups = [weight[i : i + 16, j : j + 16] for i in range(0, rows, 16) for j in range(0, columns, 16)]
            else:
                lines = weight if axis == -1 else weight.T
                groups = [line[i : i + pattern.m] for line in lines for i in range(0, line.numel(), pattern.m)]
            counts = [sum(value != 0 for value in group.flatten().tolist()) for group in groups]
            flat = weight.flatten().tolist()
            assert report == WeightReport(
                "w",
                (rows, columns),
                axis,
                groups=len(groups),
                nonzeros=sum(counts),
                violations=sum(count > pattern.kept_count for count in counts),
                negative_zeros=sum(value == 0 and math.copysign(1, value) < 0 for value in flat),
                nonfinite=sum(not math.isfinite(value) for value in flat),
            )


def test_pieces_hold_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(96, 64)
    full = [check_weight(weight, "w", p, a) for p in (NM(2, 4), NM(4, 8), Block(16)) for a in (-1, -2)]
    monkeypatch.setattr(counting, "CHUNK", 100)
    assert [check_weight(weight, "w", p, a) for p in (NM(2, 4), NM(4, 8), Block(16)) for a in (-1, -2)] == full
