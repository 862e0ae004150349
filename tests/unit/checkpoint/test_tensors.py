from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseforge_ds.checkpoint.tensors import TensorFolder
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
