"""Local files of text: what is readable, one document after another, from any record on."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

SUFFIXES = (".txt", ".jsonl", ".parquet", ".arrow", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
"""What can be read. A compressed .json file is one JSON object a line, as C4 has it."""


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
    """The documents of one file; a .txt file is one document.

    Raises:
        ValueError: it cannot be read or has a record without text; the message names the line or row.
    """
    try:
        if file.suffix == ".txt":
            yield file.read_text(encoding="utf-8")
        elif file.suffix in (".parquet", ".arrow"):
            yield from _read_columns(file, text_field)
        else:
            with _open_lines(file) as lines:
                yield from _read_lines(lines, file, text_field)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset {file}: not readable ({error}); repair the file or leave it out") from error


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

    def read(self, state: dict[str, Any] | None = None) -> FileReader:
        """The documents from the start, or from where a reader's `state` was taken."""
        return FileReader(self.files, self.text_field, state)


class FileReader:
    """An iterator over the documents of files that knows where it is."""

    def __init__(self, files: tuple[Path, ...], text_field: str, state: dict[str, Any] | None) -> None:
        self._files = files
        self._text_field = text_field
        self._open(0, 0) if state is None else self._open(state["file"], state["record"])

    def __iter__(self) -> FileReader:
        return self

    def __next__(self) -> str:
        while self._file < len(self._files):
            text = next(self._texts, None)
            if text is not None:
                self._record += 1
                return text
            self._open(self._file + 1, 0)
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Where the next document is: which file, and which record of it."""
        return {"file": self._file, "record": self._record}

    def rewind(self) -> None:
        """Go back to the first document."""
        self._open(0, 0)

    def _open(self, file: int, record: int) -> None:
        self._file, self._record = file, record
        texts = read_file(self._files[file], self._text_field) if file < len(self._files) else iter(())
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


def _open_lines(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    if file.suffix == ".zst":
        import pyarrow  # type: ignore[import-untyped]

        return io.TextIOWrapper(pyarrow.input_stream(str(file), compression="zstd"), encoding="utf-8")
    return file.open(encoding="utf-8")


def _read_lines(lines: IO[str], file: Path, text_field: str) -> Iterator[str]:
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


def _read_columns(file: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if file.suffix == ".parquet":
            table = parquet.ParquetFile(file)
            text_of(dict.fromkeys(table.schema_arrow.names, ""), text_field, str(file))
            batches = table.iter_batches(columns=[text_field])
        else:
            try:
                batches = ipc.open_stream(pyarrow.memory_map(str(file)))
            except pyarrow.ArrowInvalid:  # not the stream format of `datasets` but the file format (Feather)
                table = ipc.open_file(pyarrow.memory_map(str(file)))
                batches = (table.get_batch(i) for i in range(table.num_record_batches))
        row = 0
        for batch in batches:
            text_of(dict.fromkeys(batch.schema.names, ""), text_field, str(file))
            for value in batch.column(batch.schema.names.index(text_field)).to_pylist():
                yield text_of({text_field: value}, text_field, f"{file}, row {row}")
                row += 1
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"--dataset {file}: not a readable {file.suffix} file ({error})") from None
