"""Where the data of a zero-shot task lies on this machine: files of rows, or folders of `save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

BUILDERS = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""The loader of `datasets` for a kind of file."""
_ON_THE_HUB = {
    "arc_easy": "ai2_arc/ARC-Easy",
    "arc_challenge": "ai2_arc/ARC-Challenge",
    "rte": "glue/rte",
}
"""Where a copy of the hub has tasks that do not bear their dataset's name."""
_SPLITS = {"arc_easy": ("test", "validation"), "arc_challenge": ("test", "validation"), "openbookqa": ("test",)}
"""The splits that the harness scores, best first; where the test labels are secret it is `validation`."""


def find_data(tasks: Sequence[str], data: Sequence[str]) -> dict[str, list[Path]]:
    """The local files of every task.

    Args:
        tasks: names of the harness.
        data: `DIR` or `TASK=PATH`, as on the command line.

    Returns:
        Files by task; tasks without local data are absent only when `data` is empty.

    Raises:
        ValueError: a path does not exist or holds no usable file, or a task has no data although some was given.
    """
    named = dict(entry.split("=", 1) for entry in data if "=" in entry)
    folders = [Path(entry) for entry in data if "=" not in entry]
    for task in named:
        if task not in tasks:
            raise ValueError(f"--data {task}=...: {task} is not in --tasks {','.join(tasks)}")
    found: dict[str, list[Path]] = {}
    for task in tasks if data else ():
        names = [f"{task}{suffix}" for suffix in ("", *BUILDERS)] + [_ON_THE_HUB.get(task, task)]
        places = [Path(named[task])] if task in named else [folder / name for folder in folders for name in names]
        place = next((place for place in places if place.exists()), None)
        if place is None:
            raise ValueError(f"--data: no data of {task}; looked for {', '.join(map(str, places)) or 'nothing'}")
        files = _files(task, place) if place.is_dir() else [place]
        if not files or len({file.suffix for file in files}) != 1 or files[0].suffix not in BUILDERS:
            raise ValueError(f"--data {place}: give files of one kind, {', '.join(BUILDERS)}")
        found[task] = files
    return found


def _files(task: str, folder: Path) -> list[Path]:
    """The data files of a folder, or of the only place below it that may be meant."""
    while True:
        # `map` and `filter` of datasets leave their results beside the rows, as cache-*.arrow
        files = sorted(f for f in folder.iterdir() if f.suffix in BUILDERS and not f.name.startswith("cache-"))
        if files:
            _check_saved(folder, files)
            return files
        below = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        wanted = [folder / split for split in _SPLITS.get(task, ("validation", "test")) if folder / split in below]
        if not wanted and len(below) != 1:
            return []
        folder = (wanted or below)[0]


def _check_saved(folder: Path, files: list[Path]) -> None:
    """A folder of `save_to_disk` says which files are its rows, and whether all of them are."""
    state = folder / "state.json"
    if not state.is_file():
        return
    try:
        content = json.loads(state.read_text())
        listed = sorted(folder / entry["filename"] for entry in content["_data_files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--data {state}: damaged ({error!r:.200}); save the dataset again") from None
    if content.get("_indices_data_files"):
        raise ValueError(f"--data {folder}: a selection of rows; call flatten_indices() before save_to_disk")
    if listed != files:
        raise ValueError(f"--data {folder}: its files are not those that {state.name} lists; save the dataset again")
