"""Where training text comes from: one document after another, from the package, files or the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparseforge_ds.config.arguments import EMBEDDED_TEXT, SampleBy
from sparseforge_ds.data.formats import KINDS, Document, is_readable
from sparseforge_ds.data.hub import HubStream
from sparseforge_ds.data.splits import Files, find_files
from sparseforge_ds.data.stdlib_text import stdlib_documents, stdlib_file
from sparseforge_ds.data.text_files import FileStream

STREAM = "stream:"
"""Before a path: read it while the run goes on."""

Stream = FileStream | HubStream
"""A text that is too large to be read before training starts; it is tokenised while the run goes on."""


@dataclass(frozen=True)
class Documents:
    """A text that is tokenised whole before training starts, and can be read again and again.

    Two sources with equal `identity` give the same documents; the token cache is named by it.
    """

    name: str
    identity: str
    open: Callable[[], Iterator[Document]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the identity stands for, to say what differs from another text."""
    files: Files | None = None

    def __iter__(self) -> Iterator[Document]:
        return self.open()


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
        embedded = FileStream(dataset, find_files(stdlib_file("train")), "text")
        return Documents(dataset, embedded.identity, lambda: iter(stdlib_documents("train")), embedded.facts)
    path = Path(dataset.removeprefix(STREAM))
    if path.exists():
        stream = FileStream(dataset, find_files(path, split), text_field, sample_by)
        for number in range(len(stream.files.paths)):
            next(stream.read({"file": number}), None)
        if dataset.startswith(STREAM):
            return stream
        return Documents(dataset, stream.identity, stream.read, stream.facts, stream.files)
    is_hub_id = dataset.partition(":")[0].count("/") == 1 and not is_readable(dataset)
    if not is_hub_id or dataset.startswith((".", "/", "~", STREAM)):
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give a file of {KINDS}, a folder of them, "
            f"{STREAM} and one of these, a hub id like allenai/c4:en, or {EMBEDDED_TEXT}; in a mixture with =WEIGHT"
        )
    return HubStream(dataset, text_field, split, sample_by)
