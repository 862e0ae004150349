"""The DeepSpeed JSONs that come with the package, by their names.

In a checkout `sparseforge_ds/ds_configs` is a link to `ds_configs`, and in an installed package the folder itself.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "ds_configs"


def shipped_names() -> list[str]:
    """What may be said instead of a path."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def configuration_file(path: str | Path) -> Path:
    """The file that is meant by a path, or by the name of a shipped JSON, such as `zero3`; a file that exists wins."""
    given = Path(path)
    shipped = FOLDER / f"{given.name.removesuffix('.json')}.json"
    if not given.exists() or given.is_dir():  # a folder `zero3` is no configuration
        if not os.path.dirname(path) and shipped.is_file():
            return shipped
        if not given.exists():
            raise ValueError(
                f"{path}: no such file; give a path, or the name of a configuration of the package: "
                f"{', '.join(shipped_names())}"
            )
    return given
