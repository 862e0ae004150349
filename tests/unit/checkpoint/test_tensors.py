from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparseforge_ds as package
from sparseforge_ds.checkpoint.tensors import TensorFolder, fingerprint_weights
from sparseforge_ds.export.writer import write_tensors
from tests.unit.export.test_writer import SPECS, TENSORS


def test_folders_without_readable_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        TensorFolder(tmp_path)
    write_tensors(tmp_path, "model", SPECS, lambda name: {name: TENSORS[name]}, max_shard_bytes=60)
    files = sorted(tmp_path.glob("*.safetensors"))
    left = tmp_path / "model.safetensors"
    left.write_bytes(files[0].read_bytes())
    with pytest.raises(ValueError, match=r"has both model.safetensors and model.safetensors.index.json"):
        TensorFolder(tmp_path)
    left.unlink()
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


def test_every_tensor_of_every_shard_counts(tmp_path: Path) -> None:
    """transformers loads them all, whatever the index says, and of two with one name the last."""
    write_tensors(tmp_path, "model", SPECS, lambda name: {name: TENSORS[name]}, max_shard_bytes=60)
    first, *_, last = sorted(tmp_path.glob("*.safetensors"))
    stored = load_file(last)
    save_file({**stored, "more": torch.ones(2)}, last)
    folder = TensorFolder(tmp_path)
    assert folder.specs.keys() == SPECS.keys() | {"more"} and folder.files["more"] == last.name
    assert folder.read("more").tolist() == [1, 1]
    name, value = next(iter(load_file(first).items()))
    save_file({**stored, name: value}, last)
    with pytest.raises(ValueError, match=f"{name} is in two files, {first.name} and {last.name}, .* save the model"):
        TensorFolder(tmp_path)


def test_the_fingerprint_of_a_model_stays_what_runs_have_recorded() -> None:
    own_model = Path(package.__file__).parent / "assets" / "stdlib_llama"
    assert fingerprint_weights(own_model) == "0318514ef4b92e2a8c57a50db8b65964eb22295ceb4e1921dee50bc1318c2886"


def test_shards_without_their_index_name_it(tmp_path: Path) -> None:
    write_tensors(tmp_path, "model", SPECS, lambda name: {name: TENSORS[name]}, max_shard_bytes=60)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"it has model-00001-of-\d+\.safetensors, which needs .*index.json: copy"):
        TensorFolder(tmp_path)
