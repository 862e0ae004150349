"""DeepSpeed JSONs of the package, by their names.

In a checkout `sparseforge_ds/ds_configs` is a link to `ds_configs`, and in an installed package the folder itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from sparseforge_ds.config.given_path import path_exists

FOLDER = Path(__file__).parents[1] / "ds_configs"


def shipped_names() -> list[str]:
    """Return the names that can replace a path."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def configuration_file(path: str | Path) -> Path:
    """Return the file of a path, or of the name of a shipped JSON like `zero3`. A file that exists wins.

    Raises:
        ValueError: there is neither, or the path cannot be looked at.
    """
    file = Path(path)
    shipped = FOLDER / f"{file.name.removesuffix('.json')}.json"
    exists = path_exists(file, str(path))
    if not exists or file.is_dir():  # a folder `zero3` is no configuration
        if not os.path.dirname(path) and shipped.is_file():
            return shipped
        if not exists:
            raise ValueError(
                f"{path}: no such file; give a path, or the name of a configuration of the package: "
                f"{', '.join(shipped_names())}"
            )
    return file
