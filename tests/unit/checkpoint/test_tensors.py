from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec, parse_size, write_tensors

TENSORS = {
    "matrix": torch.randn(5, 7),
    "half": torch.randn(3).bfloat16(),
    "scalar": torch.tensor(3.5),
    "count": torch.arange(9),
    "empty": torch.zeros(0, 4),
    "flag": torch.tensor([True, False]),
}
SPECS = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in TENSORS.items()}


@pytest.mark.parametrize("limit", [1, 60, 10_000])
def test_safetensors_reads_what_we_write(tmp_path: Path, limit: int) -> None:
    hashes = write_tensors(tmp_path, "model", SPECS, iter(TENSORS.items()), limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    read = {name: value for file in files for name, value in load_file(file).items()}
    assert set(read) == set(TENSORS) == set(hashes)
    for name, value in TENSORS.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value)
    assert (len(files) == 1) == (limit == 10_000) == (not (tmp_path / "model.safetensors.index.json").exists())
    folder = TensorFolder(tmp_path)
    assert folder.shapes == {name: tuple(value.shape) for name, value in TENSORS.items()}
    assert all(torch.equal(folder.read(name), value) for name, value in TENSORS.items())


def test_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        TensorFolder(tmp_path)
    write_tensors(tmp_path, "model", SPECS, iter(TENSORS.items()), 60)
    files = sorted(tmp_path.glob("*.safetensors"))
    good = files[1].read_bytes()
    files[1].write_bytes(good[:20])
    with pytest.raises(ValueError, match=f"{files[1].name}: not a readable safetensors file"):
        TensorFolder(tmp_path)
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(ValueError, match=f"{files[1].name}: does not hold .*, which model.safetensors.index.json"):
        TensorFolder(tmp_path)
    files[1].unlink()
    with pytest.raises(ValueError, match=f"{files[1].name}: not a readable"):
        TensorFolder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="outside of its folder"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("20KB", 20_000), ("17", 17), ("1 mb", 10**6)])
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "5XB", "-1GB", "GB"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="write a number of bytes"):
        parse_size(text)
