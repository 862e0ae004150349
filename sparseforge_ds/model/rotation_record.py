"""What a rotated model's folder says of its basis: rotation.json, which its runs and their exports carry along."""

from __future__ import annotations

import shutil
from pathlib import Path

from sparseforge_ds.checkpoint.folder import read_json

FILE = "rotation.json"
FORMAT = 1


def rotation_of(folder: Path) -> str | None:
    """The sha256 of the rotations that a model was made with; None where its vectors are as they were trained.

    Raises ValueError where the file is damaged.
    """
    if not (folder / FILE).is_file():
        return None
    content = read_json(folder / FILE)
    if content.get("format") != FORMAT or not isinstance(content.get("sha256"), str):
        raise ValueError(f"{folder / FILE}: is damaged or of another version; rotate again")
    return str(content["sha256"])


def keep_rotation(model: Path, folder: Path) -> None:
    """Have in a folder what that of its model says."""
    if (model / FILE).is_file():
        shutil.copyfile(model / FILE, folder / FILE)
