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
    folder = Path(name)
    quoted = shlex.quote(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{name}: has no config.json, so it is no model; of a run make one first: sparseforge consolidate "
                f"{quoted} OUT"
            )
        check_model_folder(folder)
    elif folder.exists():
        raise ValueError(f"{name}: is a file; give the folder of a model")
    elif not hub:
        raise ValueError(f"{name}: no such folder; give a model")
    else:
        _require_on_hub(name)


def register_packed24(name: str) -> None:
    """Make transformers know the packed24 format if a model is stored in it."""
    from sparseforge_ds.model.registration import load_config
    from sparseforge_ds.model.stored_config import is_packed_config

    if is_packed_config(vars(load_config(name, name))):
        from sparseforge_ds.extras.packed24 import register_format

        register_format()


def _require_on_hub(name: str) -> None:
    """Reject a name that is neither in the cache of the hub nor on it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from sparseforge_ds.model.hub_access import why_unreachable
    from sparseforge_ds.model.registration import load_config

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        raise ValueError(f"{name}: no such folder; give that of a model, or a hub id like owner/name") from None
    if cached:
        return
    if (why := why_unreachable()) is not None:
        raise ValueError(f"{name}: no such folder, and no model in the cache of the hub; {why}")
    load_config(name, name)
