"""Sources of text, a reader that continues from any of their documents, and local files as a source."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseforge_ds.config.arguments import LossOn, SampleBy
from sparseforge_ds.data.documents import Document
from sparseforge_ds.data.formats import documents_of
from sparseforge_ds.data.splits import Files


class Reader:
    """An iterator over the documents of files that knows where it is.

    Args:
        files: paths or addresses.
        text_field: field of a record that holds the text.
        sample_by: what is a document of a .txt file.
        state: where to begin, as `state` gave it; without a file at the first document.
        loss_on: with `completion` plain text is refused.
    """

    def __init__(
        self,
        files: Sequence[str],
        text_field: str,
        sample_by: SampleBy,
        state: Mapping[str, Any],
        loss_on: LossOn = "all",
    ) -> None:
        self._files = files
        self._how = text_field, sample_by, loss_on
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
        documents = documents_of(self._files[file], *self._how) if file < len(self._files) else iter(())
        self._documents = itertools.islice(documents, record, None)


class Source(ABC):
    """One text that `--dataset` names."""

    name: str
    """What users call it."""
    streamed: bool
    """Whether it is tokenised while the run goes on, and not whole before it starts."""
    loss_on: LossOn = "all"
    """Which of its tokens are trained on."""
    document_attention: bool = False
    """Whether attention stays inside its documents, so that its tokens say where each begins."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What decides the documents, by names that users know; `files` has the content of each file by its name."""

    @abstractmethod
    def read(self, state: Mapping[str, Any] | None = None) -> Reader:
        """The documents from the start, or from where a reader's `state` was taken.

        Raises:
            ValueError: they cannot be found or read.
        """

    @property
    def marks(self) -> tuple[LossOn, bool]:
        """What its tokens say beside their ids: which are trained on, and which begin a document."""
        return self.loss_on, self.document_attention

    @property
    def identity(self) -> str:
        """Sources with equal identity give the same documents, a hub dataset at the same revision."""
        return json.dumps({**self.facts, "files": list(self.facts.get("files", {}).values())})


@dataclass(frozen=True)
class LocalText(Source):
    """Files of this machine."""

    name: str
    files: Files
    text_field: str
    sample_by: SampleBy = "document"
    streamed: bool = False
    loss_on: LossOn = "all"
    document_attention: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """See `Source`."""
        how = {"--text_field": self.text_field, "--sample_by": self.sample_by, "--loss_on": self.loss_on}
        return {**how, "--document_attention": self.document_attention, "files": self.files.contents}

    def read(self, state: Mapping[str, Any] | None = None) -> Reader:
        """See `Source`."""
        files = [str(path) for path in self.files.paths]
        return Reader(files, self.text_field, self.sample_by, state or {}, self.loss_on)
