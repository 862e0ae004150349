"""Files of text that are read while the run goes on, and a reader that continues from any of their records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseforge_ds.config.arguments import SampleBy
from sparseforge_ds.data.formats import Document, documents_of
from sparseforge_ds.data.splits import Files


@dataclass(frozen=True)
class FileStream:
    """Local files that are read while the run goes on."""

    name: str
    files: Files
    text_field: str
    sample_by: SampleBy = "document"

    @property
    def facts(self) -> dict[str, Any]:
        """What the identity stands for, with the files by name."""
        return {"--text_field": self.text_field, "--sample_by": self.sample_by, "files": self.files.contents}

    @property
    def identity(self) -> str:
        """Two streams with equal identity give the same documents."""
        return json.dumps(["files", self.files.identity, self.text_field, self.sample_by])

    def read(self, state: Mapping[str, Any] | None = None) -> Reader:
        """The documents from the start, or from where a reader's `state` was taken."""
        files = [str(path) for path in self.files.paths]
        return Reader(files, lambda file: documents_of(file, self.text_field, self.sample_by), state or {})


class Reader:
    """An iterator over the documents of files that knows where it is.

    Args:
        files: paths or addresses.
        read: the documents of one of them, from its start.
        state: where to begin, as `state` gave it; without a file at the first document.
    """

    def __init__(
        self, files: Sequence[str], read: Callable[[str], Iterator[Document]], state: Mapping[str, Any]
    ) -> None:
        self._files = files
        self._read = read
        self._pinned = {name: value for name, value in state.items() if name not in ("file", "record")}
        self._go_to(state.get("file", 0), state.get("record", 0))

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Document:
        while self._file < len(self._files):
            document = next(self._documents, None)
            if document is not None:
                self._record += 1
                return document
            self._go_to(self._file + 1, 0)
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Where the next document is, as JSON types: which file, which record of it, and of which revision."""
        return {**self._pinned, "file": self._file, "record": self._record}

    def rewind(self) -> None:
        """Go back to the first document."""
        self._go_to(0, 0)

    def _go_to(self, file: int, record: int) -> None:
        self._file, self._record = file, record
        documents = self._read(self._files[file]) if file < len(self._files) else iter(())
        self._documents = itertools.islice(documents, record, None)
