"""Text of the demo: the documentation of Python 3.11's standard library, shipped in the package.

`assets/stdlib_text/README.md` says where it comes from.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "stdlib_text"


def stdlib_file(split: Split) -> Path:
    """Return the path of a split: one JSON record a line, with the field `text`.

    Raises:
        ValueError: there is no such split.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', not {split!r}")
    return _FOLDER / f"{split}.jsonl.gz"


def stdlib_documents(split: Split) -> list[str]:
    """Return the documents of a split, one per module or topic, sorted by name; errors as `stdlib_file`."""
    with gzip.open(stdlib_file(split), "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line)["text"] for line in lines]
