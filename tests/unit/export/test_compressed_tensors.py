"""Quantized folders, written by the compressed-tensors library itself: `verify` says whether the pattern survived."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparseforge_ds.cli.main import main
from sparseforge_ds.export import compressed_tensors
from sparseforge_ds.export.compressed_tensors import pack_codes, packed_shape
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.mask.pattern import NM
from tests.sparse_folders import write_dense, write_sparse

DOWN = "model.layers.0.mlp.down_proj.weight"
FORMATS: dict[str, dict[str, Any]] = {
    "int-quantized": {"num_bits": 8, "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "pack-quantized": {"num_bits": 4, "strategy": "group", "group_size": 16},
}


def quantized(folder: Path, format: str, violations: int = 0) -> Path:
    """Write a 2:4 Llama rounded to nearest, as llm-compressor saves it; some groups are filled up before."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: pip install '.[quantized]'")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    # A 2:4 model, of which the first groups of one weight are filled up.
    made = write_sparse(folder / "sparse", write_dense(folder / "dense", "llama"), "llama")
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=True, **FORMATS[format]))
    compressor = BaseCompressor.get_value_from_registry(format)
    tensors = load_file(made / "model.safetensors")
    stored = {}
    tensors[DOWN].view(-1, 4)[:violations] = 1.0
    # Round each linear weight to nearest, and store it as the format does.
    for name, weight in tensors.items():
        if "_proj" not in name:
            stored[name] = weight
            continue
        size = FORMATS[format].get("group_size", weight.shape[1])
        largest = 448 if "float" in format else 2 ** (FORMATS[format]["num_bits"] - 1) - 1
        scale = weight.reshape(len(weight), -1, size).abs().amax(-1).clamp_min(1e-6) / largest
        parts = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        stored |= {f"{name.removesuffix('weight')}{leaf}": part.contiguous() for leaf, part in parts.items()}
    # Nothing of ours is left: others write no sparsity.json.
    (made / "sparsity.json").unlink()
    save_file(stored, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    groups = {"group_0": scheme.model_dump(mode="json")}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("format", FORMATS)
def test_verify_counts_groups_that_quantization_broke(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = quantized(tmp_path / "good", format)
    assert main(["verify", str(good)]) == 0
    assert (
        "14 of the folder's weights are quantized: the quantization kept every group\nOK\n" in capsys.readouterr().out
    )
    report = check_folder(good)
    assert (report.pattern, report.quantized, report.notes) == ("2:4", 14, [])
    assert {row.name: row.shape for row in report.rows}[DOWN] == (32, 64)
    spoiled = quantized(tmp_path / "spoiled", format, violations=3)
    assert main(["verify", str(spoiled), "--pattern", "2:4"]) == 1
    assert (
        "14 of the folder's weights are quantized: the quantization did not keep the pattern" in capsys.readouterr().out
    )
    assert [(row.name, row.violations) for row in check_folder(spoiled, NM(2, 4)).rows if row.violations] == [(DOWN, 3)]


def test_damaged_weights_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = quantized(tmp_path, "pack-quantized")
    config = (made / "config.json").read_text()
    tensors = load_file(made / "model.safetensors")
    # Codes whose shape does not fit.
    packed = DOWN + "_packed"
    save_file({**tensors, packed: tensors[packed][:, :1].contiguous()}, made / "model.safetensors")
    assert main(["verify", str(made), "--pattern", "2:4"]) == 2
    assert f"{DOWN}_packed is torch.int32 of shape (32, 1), and for 4 bits" in capsys.readouterr().err
    # Scales that no rounding gives, and scales of another shape or dtype.
    scale = DOWN + "_scale"
    for value in (0.0, -1.0, float("nan"), float("inf")):
        scales = tensors[scale].clone()
        scales[3, 1] = value
        save_file({**tensors, scale: scales}, made / "model.safetensors")
        assert main(["verify", str(made), "--pattern", "2:4"]) == 2
        assert f"{DOWN}: scales are positive and finite, and 1 are not, first {value}" in capsys.readouterr().err
    for strange in (tensors[scale][:, :2].contiguous(), tensors[scale].double()):
        save_file({**tensors, scale: strange}, made / "model.safetensors")
        assert main(["verify", str(made), "--pattern", "2:4"]) == 2
        assert f"{DOWN}_scale is {strange.dtype} of shape {tuple(strange.shape)}, and for" in capsys.readouterr().err
    # A group size that does not divide the inputs.
    (made / "config.json").write_text(config.replace('"group_size": 16', '"group_size": 24'))
    save_file(tensors, made / "model.safetensors")
    assert main(["verify", str(made), "--pattern", "2:4"]) == 2
    assert "inputs, and groups of 24 do not divide them" in capsys.readouterr().err
    # Codes that are missing.
    (made / "config.json").write_text(config)
    save_file({name: tensor for name, tensor in tensors.items() if name != packed}, made / "model.safetensors")
    assert main(["verify", str(made), "--pattern", "2:4"]) == 2
    assert f"{DOWN}_scale is there without {DOWN}" in capsys.readouterr().err
    # A damaged config.
    (made / "config.json").write_text(config.replace('"num_bits": 4', '"num_bits": "four"'))
    assert main(["verify", str(made), "--pattern", "2:4"]) == 2
    assert "its quantization_config is damaged" in capsys.readouterr().err


def test_what_was_pruned_and_not_quantized_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    config = json.loads((made / "config.json").read_text())
    sparsity = {"format": "dense", "sparsity_structure": "2:4"}
    stored = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "sparsity_config": sparsity}
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    monkeypatch.setattr(compressed_tensors.importlib.util, "find_spec", lambda name: None)
    report = check_folder(made)
    assert report.ok and not report.quantized


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}}
    (made / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(compressed_tensors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"its weights are quantized, .* in the checkout pip install '\.\[quantized\]'"
    ):
        check_folder(made)


@pytest.mark.parametrize(("bits", "inputs"), [(4, 32), (4, 12), (8, 32), (8, 6)])
def test_codes_are_packed_as_the_library_does(bits: int, inputs: int) -> None:
    largest = 2 ** (bits - 1) - 1
    code_OI = torch.randint(-largest, largest + 1, (5, inputs), generator=torch.Generator().manual_seed(0)).to(
        torch.int8
    )
    packed = pack_codes(code_OI, bits)
    assert packed.dtype == torch.int32 and tuple(packed.shape) == packed_shape((5, inputs), bits)
    for row, words in zip(code_OI.tolist(), packed.tolist(), strict=True):
        bits_of_row = sum((word % 2**32) << (32 * number) for number, word in enumerate(words))
        assert [(bits_of_row >> (bits * i)) % 2**bits - 2 ** (bits - 1) for i in range(inputs)] == row
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(packed, helpers.pack_to_int32(code_OI, bits))


def test_only_weights_that_were_trained_quantized_are_exported_as_codes(tmp_path: Path) -> None:
    made = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    with pytest.raises(ValueError, match='has no quantized weights.*"quantize" in the sparseforge block'):
        export(open_source(made), tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()
