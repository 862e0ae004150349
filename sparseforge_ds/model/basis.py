"""Records in a model's folder of the permutation of its channels and the rotation of its hidden vectors."""

from __future__ import annotations

import shutil
from pathlib import Path

from sparseforge_ds.checkpoint.folder import read_json_object

PERMUTATION = "permutation.json"
ROTATION = "rotation.json"
FORMAT = 1


def basis_of(folder: Path) -> dict[str, str]:
    """Return the sha256 in each of the two records that a folder has, by file name.

    Hidden vectors of two models can be compared only if both have the same.

    Raises:
        ValueError: a record is damaged.
    """
    basis = {}
    for file in (PERMUTATION, ROTATION):
        if (folder / file).is_file():
            content = read_json_object(folder / file)
            if content.get("format") != FORMAT or not isinstance(content.get("sha256"), str):
                raise ValueError(f"{folder / file}: is damaged or of another version; make the model's folder again")
            basis[file] = content["sha256"]
    return basis


def keep_basis(model_folder: Path, folder: Path) -> None:
    """Copy the records of `model_folder` into `folder`."""
    for file in (PERMUTATION, ROTATION):
        if (model_folder / file).is_file():
            shutil.copyfile(model_folder / file, folder / file)
