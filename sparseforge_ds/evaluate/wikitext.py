"""WikiText-2 as the papers score it: all rows of the raw test split, blank ones too, joined by two newlines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset, load_from_disk

from sparseforge_ds.data.local_rows import load_rows

NAME = "wikitext2"
"""`--text` of the split on the hub; `wikitext2:PATH` is a copy of its rows on this machine."""
_HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")
_BUILDERS = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


def is_wikitext2(source: str) -> bool:
    """Whether a `--text` names this set."""
    return source == NAME or source.startswith(f"{NAME}:")


def read_wikitext2(source: str) -> str:
    """The test split, from the hub, a folder of `save_to_disk` or a file of rows, as one text."""
    path = source.removeprefix(NAME).removeprefix(":")
    try:
        rows = _local(Path(path)) if path else load_dataset(*_HUB, split="test")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
        raise ValueError(f"--text {source}: cannot be read ({reason})") from None
    if "text" not in rows.column_names:
        raise ValueError(f"--text {source}: its rows have no column 'text' ({', '.join(rows.column_names)})")
    return "\n\n".join(rows["text"])


def _local(path: Path) -> Any:
    if path.is_dir():
        found = load_from_disk(str(path))
        return found["test"] if isinstance(found, DatasetDict) else found
    if path.suffix not in _BUILDERS:
        raise ValueError(f"give a folder of save_to_disk, or a file of {', '.join(_BUILDERS)}")
    return load_rows(_BUILDERS[path.suffix], data_files=[str(path.absolute())], split="train")
