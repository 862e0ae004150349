"""Progress bars of a command and its libraries: all are tqdm's, which reads the environment."""

from __future__ import annotations

import os
import sys

_SIZE = {"TQDM_NCOLS": 80, "TQDM_NROWS": 24}
"""Size for a terminal that does not tell its own, as in a container; tqdm would show nothing there."""


def set_up_bars() -> None:
    """Silence bars where stderr is no terminal, and give them a size where the terminal has none.

    tqdm must not be imported yet.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    elif 0 in os.get_terminal_size(sys.stderr.fileno()):
        for variable, size in _SIZE.items():
            os.environ.setdefault(variable, str(size))
