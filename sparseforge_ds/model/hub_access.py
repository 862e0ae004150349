"""Names on the hub of models, and a brief check that it answers, for which huggingface_hub would try for a minute."""

from __future__ import annotations

import re
import threading
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from sparseforge_ds.model.loading_error import reason

SECONDS = 5.0
"""Time that the hub has to answer."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""owner/name."""
HUB_ID = re.compile(rf"{REPOSITORY.pattern}(:\S*)?", re.ASCII)
"""owner/name, perhaps with a part of it."""


def why_unreachable(name: str | Path | None = None) -> str | None:
    """Return the reason why the hub cannot be asked, or None if it answers anything at all.

    An existing file or folder needs no hub, so its `name` gives None too.
    """
    if name is not None and Path(name).exists():
        return None
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE says that the hub is not to be asked"
    return ask_hub()


@cache
def ask_hub() -> str | None:
    """Ask the hub for its first page, and return the reason if it does not answer."""
    failures: list[str] = []
    answered = threading.Event()

    def ask() -> None:
        try:
            huggingface_hub.get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except (OSError, HTTPError) as error:
            failures.append(str(error) or type(error).__name__)
        answered.set()

    # A name server that does not answer holds its caller for longer than any timeout of a request.
    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(SECONDS):
        failures.append(f"no answer in {SECONDS:g} seconds")
    return f"{constants.ENDPOINT} cannot be reached ({failures[0]})" if failures else None


def find_path(name: str | Path, who: str) -> Path | None:
    """Return the path of a model on this machine; None if there is none, and the name may be a hub id.

    Args:
        name: a path, or a hub id.
        who: beginning of the message.

    Raises:
        ValueError: nothing is there, and no model on the hub can have the name.
    """
    if Path(name).exists():
        return Path(name)
    try:
        validate_repo_id(str(name))
        is_path = str(name).endswith(".json")
    except HFValidationError:
        is_path = True
    if is_path:
        raise ValueError(f"{who}: no such folder or file; give a Hugging Face model folder or a hub id like owner/name")
    return None


def not_on_hub(who: str, error: Exception) -> ValueError:
    """Return the error for a hub id whose files neither the hub nor its cache gives."""
    unreachable = why_unreachable()
    # A damaged file in the cache is told as such; transformers raises OSError for one that is not there.
    is_missing = unreachable is not None and isinstance(error, OSError)
    cause = f"it is not in the cache, and {unreachable}" if is_missing else reason(error)
    return ValueError(
        f"{who}: no such folder, and no model that can be had from the hub ({cause}); check the name and the network, "
        "or give a folder"
    )


def public_name(name: str) -> str:
    """Return the name of a model or a text for others: a hub id as it is, or the last part of a path."""
    hub = HUB_ID.fullmatch(name) and not name.startswith(".") and not Path(name).exists()
    return name if hub else Path(name).name or name
