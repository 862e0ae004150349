"""Where training text comes from: one document after another, from the standard library, files or the hub."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sparseforge_ds.train import stdlib_text
from sparseforge_ds.train.arguments import EMBEDDED_TEXT
from sparseforge_ds.train.hub import HubStream
from sparseforge_ds.train.text_files import SUFFIXES, FileStream, find_files, read_file, stamps

STREAM = "stream:"
"""Before a path: read it while the run goes on."""


@dataclass(frozen=True)
class Documents:
    """A text that is tokenised whole before training starts, and can be read again and again.

    Two sources with equal `identity` give the same documents; the token cache is named by it.
    """

    name: str
    identity: str
    open: Callable[[], Iterator[str]]

    def __iter__(self) -> Iterator[str]:
        return self.open()


class Reader(Protocol):
    """An iterator over documents that knows where it is."""

    def __next__(self) -> str:
        """The next document; StopIteration after the last."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the next document is, as JSON types, for `Stream.read`."""
        ...

    def rewind(self) -> None:
        """Go back to the first document."""
        ...


class Stream(Protocol):
    """A text that is too large to be read before training starts; it is tokenised while the run goes on."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def identity(self) -> str:
        """Two streams with equal identity give the same documents in the same order."""
        ...

    def read(self, state: dict[str, Any] | None = None) -> Reader:
        """The documents from the start, or from where a reader's `state` was taken."""
        ...


def find_documents(dataset: str, text_field: str) -> Documents | Stream:
    """The documents of one source of `--dataset`.

    Looks, but reads nothing except the first record of a file, whose field must exist.

    Raises:
        ValueError: no such file, a folder without usable files, an unknown kind of file, or a field that is missing.
    """
    if dataset == EMBEDDED_TEXT:
        recipe = hashlib.sha256(Path(stdlib_text.__file__).read_bytes()).hexdigest()
        identity = f"stdlib {sys.version} {recipe}"
        return Documents("stdlib", identity, lambda: iter(stdlib_text.stdlib_documents("train")))
    path = Path(dataset.removeprefix(STREAM))
    if path.exists():
        files = find_files(path)
        for file in files:
            next(read_file(file, text_field), None)
        if dataset.startswith(STREAM):
            return FileStream(dataset, files, text_field)
        identity = json.dumps(["files", stamps(files), text_field])
        return Documents(dataset, identity, lambda: (text for file in files for text in read_file(file, text_field)))
    is_hub_id = dataset.partition(":")[0].count("/") == 1 and not dataset.endswith(SUFFIXES)
    if not is_hub_id or dataset.startswith((".", "/", "~", STREAM)):
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give {', '.join(SUFFIXES)}, a folder of them, "
            f"{STREAM} and one of these, a hub id like allenai/c4:en, or {EMBEDDED_TEXT}; in a mixture with =WEIGHT"
        )
    return HubStream(dataset, text_field)
