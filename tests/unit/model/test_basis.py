"""Records of the order and basis of channels in a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseforge_ds.model.basis import basis_of, keep_basis


def test_it_goes_along_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    model, copy = tmp_path / "model", tmp_path / "copy"
    for folder in (model, copy):
        folder.mkdir()
    keep_basis(model, copy)
    assert basis_of(copy) == {}
    for file in ("permutation.json", "rotation.json"):
        (model / file).write_text(json.dumps({"format": 1, "sha256": file[0]}))
    keep_basis(model, copy)
    assert basis_of(copy) == basis_of(model) == {"permutation.json": "p", "rotation.json": "r"}
    for damaged in ({"format": 2, "sha256": "p"}, {"format": 1}):
        (copy / "permutation.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"permutation\.json: is damaged or of another version"):
            basis_of(copy)
