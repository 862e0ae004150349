"""Text of the demo: the documentation of Python 3.11's standard library, shipped in the package.

`assets/stdlib_text/README.md` says where it comes from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "stdlib_text"


def stdlib_file(split: Split) -> Path:
    """Return the path of a split: one JSON record a line, with the field `text`."""
    return _FOLDER / f"{split}.jsonl.gz"
