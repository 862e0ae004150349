"""Sources of text, a reader that continues from any document, and local files as a source."""

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
    """Run flags that decide how files become documents, and documents tokens; fields are named as the flags."""

    text_field: str = "text"
    split: str = "train"
    sample_by: SampleBy = "document"
    loss_on: LossOn = "all"
    document_attention: bool = False

    @classmethod
    def from_arguments(cls, arguments: RunArguments, split: str | None = None) -> TextOptions:
        """Take the options from the flags of a run; `split`, if given, replaces `--split`."""
        options = cls(**{item.name: getattr(arguments, item.name) for item in fields(cls)})
        return options if split is None else replace(options, split=split)


DEFAULTS = TextOptions()


class Reader:
    """Iterator over the documents of files that knows its position.

    Args:
        files: paths or addresses.
        options: how files are read.
        state: position to begin at, from `state()`. Without an entry `file` it is the first document.
    """

    def __init__(self, files: Sequence[str], options: TextOptions, state: Mapping[str, Any]) -> None:
        self._files = files
        self._options = options
        self._pinned = {name: value for name, value in state.items() if name not in ("file", "record")}
        self._go_to(state.get("file", 0), state.get("record", 0))

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Document:
        while self._file < len(self._files):
            document = next(self._documents, None)
            if document is not None:
                if self._options.sample_by == "document" and is_plain_text(self._files[self._file]):
                    check_size(self._files[self._file], len(str(document).encode()))
                self._record += 1
                return document
            self._go_to(self._file + 1, 0)
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Return the position of the next document as JSON types: file, record, and revision of a hub dataset."""
        return {**self._pinned, "file": self._file, "record": self._record}

    def rewind(self) -> None:
        """Go back to the first document."""
        self._go_to(0, 0)

    def _go_to(self, file: int, record: int) -> None:
        self._file = file
        self._record = record
        options = self._options
        documents = (
            iter_documents(self._files[file], options.text_field, options.sample_by, options.loss_on)
            if file < len(self._files)
            else iter(())
        )
        self._documents = itertools.islice(documents, record, None)


class TextSource(ABC):
    """Text that one value of `--dataset` names."""

    name: str
    """The value of the flag, without its share."""
    options: TextOptions = DEFAULTS
    streamed: bool
    """True if the text is tokenized while the run goes on, False if before it starts."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the settings that decide the documents, by flag; `files` maps each file to its content's hash."""

    @abstractmethod
    def read(self, state: Mapping[str, Any] | None = None) -> Reader:
        """Return a reader of the documents, from the first one or from a reader's `state()`.

        Raises:
            ValueError: the files cannot be found or read.
        """

    @property
    def flags(self) -> tuple[LossOn, bool]:
        """Return which flags accompany a token: `loss_on` and `document_attention`, as `token_batches` takes them."""
        return self.options.loss_on, self.options.document_attention

    @property
    def identity(self) -> str:
        """Return a string that is equal for sources with equal documents (hub datasets: at the same revision)."""
        return json.dumps({**self.facts, "files": list(self.facts.get("files", {}).values())})


@dataclass(frozen=True)
class LocalText(TextSource):
    """Files of this machine."""

    name: str
    files: Files
    options: TextOptions = DEFAULTS
    streamed: bool = False

    @property
    @override
    def facts(self) -> dict[str, Any]:
        flags = {f"--{name}": getattr(self.options, name) for name in ("text_field", "sample_by", "loss_on")}
        return {**flags, "--document_attention": self.options.document_attention, "files": self.files.contents}

    @override
    def read(self, state: Mapping[str, Any] | None = None) -> Reader:
        return Reader(self.files.path_texts, self.options, state or {})
