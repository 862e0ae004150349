"""Checks of MODEL on a command line: it must exist and be a model, before its weights are read."""

from __future__ import annotations

import shlex
from pathlib import Path

from sparseforge_ds.checkpoint.model_files import check_model_folder


def require_model(name: str, hub: bool = True) -> None:
    """Reject a name that is no model: a run, a file, or nothing at all.

    Args:
        name: the value of MODEL.
        hub: True if it may be a hub id.
    """
    if not name:
        raise ValueError("MODEL is empty; give the folder of a model")
    from sparseforge_ds.model.hub_access import find_path

    folder = find_path(name, name) if hub else Path(name)
    if folder is None:
        from sparseforge_ds.model.registration import load_config

        load_config(name, name)
    elif folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{name}: has no config.json, so it is no model; of a run make one first: sparseforge consolidate "
                f"{shlex.quote(name)} OUT"
            )
        check_model_folder(folder)
    elif folder.exists():
        raise ValueError(f"{name}: is a file; give the folder of a model")
    else:
        raise ValueError(f"{name}: no such folder; give a model")


def register_packed24(name: str) -> None:
    """Make transformers know the packed24 format if a model is stored in it."""
    from sparseforge_ds.model.registration import load_config
    from sparseforge_ds.model.stored_config import is_packed_config

    if is_packed_config(vars(load_config(name, name))):
        from sparseforge_ds.extras.packed24 import register_format

        register_format()
