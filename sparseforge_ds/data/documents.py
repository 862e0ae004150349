"""Where training text comes from: one document after another, from the standard library, files or the hub."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sparseforge_ds.config.arguments import EMBEDDED_TEXT, SampleBy
from sparseforge_ds.data import stdlib_text
from sparseforge_ds.data.formats import KINDS, is_readable
from sparseforge_ds.data.hub import HubStream
from sparseforge_ds.data.splits import Files, find_files
from sparseforge_ds.data.text_files import FileStream, read_file

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
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the identity stands for, to say what differs from another text."""
    files: Files | None = None

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

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the identity stands for, as JSON types, to say what differs from another text."""
        ...

    def read(self, state: dict[str, Any] | None = None) -> Reader:
        """The documents from the start, or from where a reader's `state` was taken."""
        ...


def find_documents(
    dataset: str, text_field: str, split: str = "train", sample_by: SampleBy = "document"
) -> Documents | Stream:
    """The documents of one source of `--dataset`.

    Looks, but reads nothing except the first record of a file, whose field must exist, and samples of its content.

    Args:
        dataset: a path, stream: and a path, a hub id, or stdlib.
        text_field: field of a record that holds the text.
        split: split of a folder or hub dataset, or several, joined by +.
        sample_by: what is a document of a .txt file.

    Raises:
        ValueError: no such file, a folder without usable files or that split, an unknown kind of file, or a field that
            is missing.
    """
    if dataset == EMBEDDED_TEXT:
        if "train" not in split.split("+"):
            raise ValueError(f"--split {split}: --dataset {EMBEDDED_TEXT} has train only; name another text")
        recipe = hashlib.sha256(Path(stdlib_text.__file__).read_bytes()).hexdigest()
        identity = f"stdlib {sys.version} {recipe}"
        facts = {"Python": sys.version, "its documentation as text": recipe[:16]}
        return Documents("stdlib", identity, lambda: iter(stdlib_text.stdlib_documents("train")), facts)
    path = Path(dataset.removeprefix(STREAM))
    if path.exists():
        return _find_files(dataset, path, text_field, split, sample_by)
    is_hub_id = dataset.partition(":")[0].count("/") == 1 and not is_readable(dataset)
    if not is_hub_id or dataset.startswith((".", "/", "~", STREAM)):
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give a file of {KINDS}, a folder of them, "
            f"{STREAM} and one of these, a hub id like allenai/c4:en, or {EMBEDDED_TEXT}; in a mixture with =WEIGHT"
        )
    return HubStream(dataset, text_field, split, sample_by)


def _find_files(dataset: str, path: Path, text_field: str, split: str, sample_by: SampleBy) -> Documents | FileStream:
    files = find_files(path, split)
    for file in files.paths:
        next(read_file(file, text_field, sample_by), None)
    if dataset.startswith(STREAM):
        return FileStream(dataset, files, text_field, sample_by)
    identity = json.dumps(["files", files.identity, text_field, sample_by])
    facts = {"--text_field": text_field, "--sample_by": sample_by, "files": files.contents}

    def open_documents() -> Iterator[str]:
        return (text for file in files.paths for text in read_file(file, text_field, sample_by))

    return Documents(dataset, identity, open_documents, facts, files)
