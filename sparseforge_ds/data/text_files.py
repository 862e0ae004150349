"""Sources of text, a reader that continues from any of their documents, and local files as a source."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from typing_extensions import override

from sparseforge_ds.config.arguments import LossOn, RunArguments, SampleBy
from sparseforge_ds.data.documents import Document
from sparseforge_ds.data.splits import Files
from sparseforge_ds.data.text_formats import check_size, is_plain_text, iter_documents


@dataclass(frozen=True)
class TextOptions:
    """How files become documents, and documents tokens: the run flags of the same names."""

    text_field: str = "text"
    split: str = "train"
    sample_by: SampleBy = "document"
    loss_on: LossOn = "all"
    document_attention: bool = False

    @classmethod
    def from_arguments(cls, arguments: RunArguments, split: str | None = None) -> TextOptions:
        """Those of a run, with another split if one is given."""
        found = cls(**{item.name: getattr(arguments, item.name) for item in fields(cls)})
        return found if split is None else replace(found, split=split)


DEFAULTS = TextOptions()


class Reader:
    """An iterator over the documents of files that knows where it is.

    Args:
        files: paths or addresses.
        options: how they are read.
        state: where to begin, as `state` gave it; without a file at the first document.
    """

    def __init__(self, files: Sequence[str], options: TextOptions, state: Mapping[str, Any]) -> None:
        self._files = files
        self._how = options.text_field, options.sample_by, options.loss_on
        self._is_whole = options.sample_by == "document"
        self._pinned = {name: value for name, value in state.items() if name not in ("file", "record")}
        self._go_to(state.get("file", 0), state.get("record", 0))

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Document:
        while self._file < len(self._files):
            document = next(self._documents, None)
            if document is not None:
                if self._is_whole and is_plain_text(self._files[self._file]):
                    check_size(self._files[self._file], len(str(document).encode()))
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
        documents = iter_documents(self._files[file], *self._how) if file < len(self._files) else iter(())
        self._documents = itertools.islice(documents, record, None)


class Source(ABC):
    """One text that `--dataset` names."""

    name: str
    """What users call it."""
    options: TextOptions = DEFAULTS
    streamed: bool
    """Whether it is tokenised while the run goes on, and not whole before it starts."""

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
        return self.options.loss_on, self.options.document_attention

    @property
    def identity(self) -> str:
        """Sources with equal identity give the same documents, a hub dataset at the same revision."""
        return json.dumps({**self.facts, "files": list(self.facts.get("files", {}).values())})


@dataclass(frozen=True)
class LocalText(Source):
    """Files of this machine."""

    name: str
    files: Files
    options: TextOptions = DEFAULTS
    streamed: bool = False

    @property
    @override
    def facts(self) -> dict[str, Any]:
        how = {f"--{name}": getattr(self.options, name) for name in ("text_field", "sample_by", "loss_on")}
        return {**how, "--document_attention": self.options.document_attention, "files": self.files.contents}

    @override
    def read(self, state: Mapping[str, Any] | None = None) -> Reader:
        return Reader([str(path) for path in self.files.paths], self.options, state or {})
