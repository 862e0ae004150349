"""Paths that a flag names."""

from __future__ import annotations

import os
from pathlib import Path


def path_exists(path: str | Path, who: str) -> bool:
    """Return True if there is a file or folder at a path.

    Args:
        path: the path.
        who: flag and value, for the error.

    Raises:
        ValueError: that cannot be known: a name is too long, or a folder on the way is closed.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no path has a null character
        return False
    except OSError as error:
        raise ValueError(
            f"{who:.200}: cannot be looked at ({error.strerror}); check its name and its permissions"
        ) from None
    return True
