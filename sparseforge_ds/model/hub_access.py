"""Whether the hub of models answers: asked once and briefly, where huggingface_hub would try for a minute."""

from __future__ import annotations

import threading
from functools import cache

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError

SECONDS = 5.0


def why_unreachable() -> str | None:
    """None when the hub answers, whatever it says; else why what is not in the cache cannot be had from it."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE says that the hub is not to be asked"
    return _asked()


@cache
def _asked() -> str | None:
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
