"""Files of text that are read while the run goes on, and a reader that continues from any of their records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparseforge_ds.config.arguments import SampleBy
from sparseforge_ds.data.formats import DAMAGED, documents_of
from sparseforge_ds.data.splits import Files

File = TypeVar("File")


def read_file(file: Path, text_field: str, sample_by: SampleBy = "document") -> Iterator[str]:
    """The documents of one local file, "" for each without text.

    Raises:
        ValueError: it cannot be read or has a record with something else than text; the message names the line or row.
    """
    try:
        yield from documents_of(str(file), text_field, sample_by)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--dataset {file}: not readable ({error}); save it as UTF-8 (iconv -f OLD -t UTF-8), or leave it out"
        ) from error
    except (OSError, *DAMAGED) as error:
        raise ValueError(f"--dataset {file}: not readable ({error}); repair the file or leave it out") from error


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
        return json.dumps(["file stream", self.files.identity, self.text_field, self.sample_by])

    def read(self, state: dict[str, Any] | None = None) -> FileReader[Path]:
        """The documents from the start, or from where a reader's `state` was taken."""
        return FileReader(self.files.paths, lambda file: read_file(file, self.text_field, self.sample_by), state)


class FileReader(Generic[File]):
    """An iterator over the documents of files that knows where it is.

    Args:
        files: the files.
        read: the documents of one of them, from its start.
        state: where to begin; None is the first document.
    """

    def __init__(
        self, files: Sequence[File], read: Callable[[File], Iterator[str]], state: dict[str, Any] | None
    ) -> None:
        self._files = files
        self._read = read
        self._go_to(0, 0) if state is None else self._go_to(state["file"], state["record"])

    def __iter__(self) -> FileReader[File]:
        return self

    def __next__(self) -> str:
        while self._file < len(self._files):
            text = next(self._texts, None)
            if text is not None:
                self._record += 1
                return text
            self._go_to(self._file + 1, 0)
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Where the next document is: which file, and which record of it."""
        return {"file": self._file, "record": self._record}

    def rewind(self) -> None:
        """Go back to the first document."""
        self._go_to(0, 0)

    def _go_to(self, file: int, record: int) -> None:
        self._file, self._record = file, record
        texts = self._read(self._files[file]) if file < len(self._files) else iter(())
        self._texts = itertools.islice(texts, record, None)
