"""Files of text, local or behind an address: what is readable, one document after another, from any record on."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

File = TypeVar("File")

SUFFIXES = (".txt", ".jsonl", ".parquet", ".arrow", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
"""What can be read. A compressed .json file is one JSON object a line, as C4 and Dolmino have it."""


def find_files(path: Path) -> tuple[Path, ...]:
    """The usable files of a file or folder, in order.

    Raises:
        ValueError: there is none.
    """
    if path.is_dir():
        files = tuple(sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file()))
        if not files:
            raise ValueError(f"--dataset {path}: the folder holds no {', '.join(SUFFIXES)} file")
        return files
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"--dataset {path}: unknown kind of file {path.suffix!r}; use one of {', '.join(SUFFIXES)}")
    return (path,)


def stamps(files: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    """Name, size and time of every file: files with equal stamps hold the same text."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def read_file(file: Path, text_field: str) -> Iterator[str]:
    """The documents of one local file; a .txt file is one document.

    Raises:
        ValueError: it cannot be read or has a record without text; the message names the line or row.
    """
    try:
        yield from documents_of(str(file), text_field)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset {file}: not readable ({error}); repair the file or leave it out") from error


def documents_of(file: str, text_field: str) -> Iterator[str]:
    """The documents of one file; of a record nothing but its text is looked at.

    Args:
        file: a path, or an address that fsspec knows, like hf://datasets/owner/name@revision/file.
        text_field: field of a record that holds the text.

    Raises:
        ValueError: it is damaged or has a record without text; the message names the line or row.
        OSError, EOFError, zlib.error, UnicodeDecodeError: it cannot be read.
    """
    with _open(file) as content:
        if file.endswith((".parquet", ".arrow")):
            yield from _read_columns(content, file, text_field)
        elif file.endswith(".txt"):
            yield content.read().decode("utf-8")
        else:
            with _lines(content, file) as lines:
                yield from _read_lines(lines, file, text_field)


@dataclass(frozen=True)
class FileStream:
    """Local files that are read while the run goes on."""

    name: str
    files: tuple[Path, ...]
    text_field: str

    @property
    def identity(self) -> str:
        """Two streams with equal identity give the same documents."""
        return json.dumps(["file stream", stamps(self.files), self.text_field])

    def read(self, state: dict[str, Any] | None = None) -> FileReader[Path]:
        """The documents from the start, or from where a reader's `state` was taken."""
        return FileReader(self.files, lambda file: read_file(file, self.text_field), state)


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


def text_of(record: dict[str, Any], text_field: str, where: str) -> str:
    """The text of a record.

    Raises:
        ValueError: there is no such field, or it is not text.
    """
    if text_field not in record:
        raise ValueError(
            f"--dataset {where}: no field {text_field!r}; name the one that holds the text with --text_field "
            f"(there are: {', '.join(map(str, record))})"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(
            f"--dataset {where}: field {text_field!r} is {type(text).__name__}, not text; use --text_field"
        )
    return text


def _open(file: str) -> IO[bytes]:
    if "://" not in file:
        return open(file, "rb")
    import fsspec  # what datasets and huggingface_hub open their files with

    content: IO[bytes] = fsspec.open(file, "rb").open()
    return content


def _lines(content: IO[bytes], file: str) -> IO[str]:
    if file.endswith(".gz"):
        return gzip.open(content, "rt", encoding="utf-8")
    if file.endswith(".zst"):
        import pyarrow  # type: ignore[import-untyped]

        return io.TextIOWrapper(pyarrow.input_stream(content, compression="zstd"), encoding="utf-8")
    return io.TextIOWrapper(content, encoding="utf-8")


def _read_lines(lines: IO[str], file: str, text_field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--dataset {file}, line {number}: not JSON ({error}); repair or remove it") from None
        if not isinstance(record, dict):
            raise ValueError(f"--dataset {file}, line {number}: not an object with fields, like {{'text': ...}}")
        yield text_of(record, text_field, f"{file}, line {number}")


def _read_columns(content: IO[bytes], file: str, text_field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if file.endswith(".parquet"):
            table = parquet.ParquetFile(content)
            text_of(dict.fromkeys(table.schema_arrow.names, ""), text_field, file)
            batches = table.iter_batches(columns=[text_field])
        else:
            try:
                batches = ipc.open_stream(content)
            except pyarrow.ArrowInvalid:  # not the stream format of `datasets` but the file format (Feather)
                content.seek(0)
                table = ipc.open_file(content)
                batches = (table.get_batch(i) for i in range(table.num_record_batches))
        row = 0
        for batch in batches:
            text_of(dict.fromkeys(batch.schema.names, ""), text_field, file)
            for value in batch.column(batch.schema.names.index(text_field)).to_pylist():
                yield text_of({text_field: value}, text_field, f"{file}, row {row}")
                row += 1
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"--dataset {file}: not a readable {Path(file).suffix} file ({error})") from None
