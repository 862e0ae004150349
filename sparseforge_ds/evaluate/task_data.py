"""The rows of a zero-shot task on this machine: files, or folders as `save_to_disk` of datasets writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset, load_from_disk
from datasets.exceptions import DatasetsError

from sparseforge_ds.data.local_rows import load_rows

_BUILDERS = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""The loader of `datasets` for a kind of file."""
_ON_THE_HUB = {
    "arc_easy": "ai2_arc/ARC-Easy",
    "arc_challenge": "ai2_arc/ARC-Challenge",
    "rte": "glue/rte",
}
"""Where a copy of the hub has tasks that do not bear their dataset's name."""
_SPLITS = {"arc_easy": ("test", "validation"), "arc_challenge": ("test", "validation"), "openbookqa": ("test",)}
"""The splits that the harness scores, best first; where the test labels are secret it is `validation`."""


class Rows(NamedTuple):
    """The rows of a task."""

    place: Path
    """The file or folder that they are from, for messages."""
    rows: Dataset


def find_data(tasks: Sequence[str], data: Sequence[str]) -> dict[str, Rows]:
    """The local rows of every task.

    Args:
        tasks: names of the harness.
        data: `DIR` or `TASK=PATH`, as on the command line.

    Returns:
        Rows by task; tasks without local data are absent only when `data` is empty.

    Raises:
        ValueError: a path does not exist or cannot be read, or a task has no data although some was given.
    """
    named = dict(entry.split("=", 1) for entry in data if "=" in entry)
    folders = [Path(entry) for entry in data if "=" not in entry]
    for task in named:
        if task not in tasks:
            raise ValueError(f"--data {task}=...: {task} is not in --tasks {','.join(tasks)}")
    found: dict[str, Rows] = {}
    for task in tasks if data else ():
        names = [f"{task}{suffix}" for suffix in ("", *_BUILDERS)] + [_ON_THE_HUB.get(task, task)]
        places = [Path(named[task])] if task in named else [folder / name for folder in folders for name in names]
        place = next((place for place in places if place.exists()), None)
        if place is None:
            raise ValueError(f"--data: no data of {task}; looked for {', '.join(map(str, places)) or 'nothing'}")
        try:
            found[task] = read_rows(place, _SPLITS.get(task, ("validation", "test")))
        except ValueError as error:
            raise ValueError(f"--data {error}") from None
    return found


def read_rows(place: Path, splits: Sequence[str]) -> Rows:
    """The rows of a file, of files of one kind in a folder, or of a folder of `save_to_disk`.

    Args:
        place: the file, the folder, or one above it.
        splits: names of folders below `place` that are read, best first; without one of them, the only folder is.

    Raises:
        ValueError: there are none, or they cannot be read; the message begins with the place.
    """
    while place.is_dir() and not _files(place):
        below = sorted(
            entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith((".", "train"))
        )
        wanted = [place / split for split in splits if place / split in below]
        if not wanted and len(below) != 1:
            break
        place = (wanted or below)[0]
    files = _files(place) if place.is_dir() else [place]
    kinds = {file.suffix for file in files}
    try:
        if (place / "state.json").is_file():  # says which files are the rows, and whether some of them are chosen
            return Rows(place, load_from_disk(str(place)))
        if len(kinds) != 1 or not kinds <= _BUILDERS.keys():
            raise ValueError(f"give files of one kind, {', '.join(_BUILDERS)}")
        data_files = [str(file.absolute()) for file in files]
        return Rows(place, load_rows(_BUILDERS[kinds.pop()], data_files=data_files, split="train"))
    except (OSError, ValueError, TypeError, LookupError, DatasetsError) as error:
        said = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{place}: cannot be read ({said[:300]})") from None


def _files(folder: Path) -> list[Path]:
    """Rows in a folder; `map` and `filter` of datasets leave their results beside them, as cache-*.arrow."""
    return sorted(f for f in folder.iterdir() if f.suffix in _BUILDERS and not f.name.startswith("cache-"))
