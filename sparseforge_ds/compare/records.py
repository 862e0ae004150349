"""What is known of each run of a comparison, as files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Records:
    """`OUT/records`: a file for each run with what it was to be and what it came to, beside its history.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, name: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """The record of a run, begun if there is none.

        Raises:
            ValueError: a run of this name was made otherwise, so that it does not belong to this comparison.
        """
        wanted = json.loads(json.dumps(wanted))
        record = self.read(name)
        if record is None:
            record = {"wanted": wanted}
            self.write(name, record)
        if record["wanted"] != wanted:
            before, now = record["wanted"], wanted
            differing = [key for key in sorted(set(before) | set(now)) if before.get(key) != now.get(key)]
            raise ValueError(
                f"{self.folder.parent}: the run {name} was started with other settings ({', '.join(differing)}); give "
                "another --out, or remove this folder. Methods, seeds, budgets and learning rates may be added to a "
                "comparison, but what a run depends on may not change"
            )
        return record

    def read(self, name: str) -> dict[str, Any] | None:
        """A record, if there is one.

        Raises:
            ValueError: it is damaged.
        """
        path = self.folder / f"{name}.json"
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); remove it, and the run is made again") from None
        return dict(content)

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Keep a record."""
        write_text(self.folder / f"{name}.json", json.dumps(record, indent=1) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a file under a temporary name, then rename it."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
