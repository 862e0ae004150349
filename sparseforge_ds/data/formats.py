"""The kinds of file that hold text, plain or compressed, and the documents of one: of a record only the text."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import IO, Any

from sparseforge_ds.config.arguments import SampleBy

_LINES = (".txt", ".jsonl", ".json", ".csv", ".tsv")
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_COLUMNS = (".parquet", ".arrow")
SUFFIXES = (*_COLUMNS, *(kind + compression for kind in _LINES for compression in ("", *_COMPRESSED)))
"""Ends of the names of all files that can be read."""
KINDS = f"{', '.join(_LINES)} (each also with {', '.join(_COMPRESSED)}), {', '.join(_COLUMNS)}"
"""The same for people."""
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError)
"""What `documents_of` raises of a file whose content is not what its name says."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def is_readable(name: str) -> bool:
    """Whether files of this name can be read."""
    return name.lower().endswith(SUFFIXES)


def is_plain_text(name: str) -> bool:
    """Whether it is text without records."""
    return kind_of(name)[0] == ".txt"


def documents_of(file: str, text_field: str, sample_by: SampleBy = "document") -> Iterator[str]:
    """The documents of one file, "" for each without text.

    Args:
        file: a path, or an address that fsspec knows, like hf://datasets/owner/name@revision/file.
        text_field: field of a record that holds the text.
        sample_by: what is a document of a .txt file: a line, a paragraph, or the file.

    Raises:
        ValueError: it is damaged or has a record with something else than text; the message names the line or row.
        OSError, or one of DAMAGED: it cannot be read.
    """
    kind, compression = kind_of(file)
    with _open(file) as content:
        if kind in _COLUMNS:
            yield from _read_columns(content, file, text_field)
            return
        # A table's fields may have line ends in them, which stay as they are.
        newline = "" if kind in (".csv", ".tsv") else None
        with io.TextIOWrapper(_unpacked(content, compression), encoding="utf-8-sig", newline=newline) as lines:
            if kind == ".txt":
                yield from _read_text(lines, sample_by)
            elif kind == ".json":
                yield from _read_json(lines, file, text_field)
            elif kind == ".jsonl":
                yield from _read_lines(enumerate(lines, start=1), file, text_field)
            else:
                yield from _read_table(lines, file, text_field, "," if kind == ".csv" else "\t")


def text_of(record: dict[str, Any], text_field: str, where: str) -> str:
    """The text of a record; "" where it is null.

    A half of a surrogate pair alone, which JSON can have and no tokenizer takes, becomes U+FFFD.

    Raises:
        ValueError: there is no such field, or it is not text.
    """
    if text_field not in record:
        raise ValueError(
            f"--dataset {where}: no field {text_field!r}; name the one that holds the text with --text_field "
            f"(there are: {', '.join(map(str, record))})"
        )
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"--dataset {where}: field {text_field!r} is {type(text).__name__}, not text; use --text_field"
        )
    return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def kind_of(file: str) -> tuple[str, str]:
    """('.jsonl', '.gz') of c4-train.00000.jsonl.gz."""
    kind, compression = PurePath(file.lower()).suffix, ""
    if kind in _COMPRESSED:
        kind, compression = PurePath(file.lower()).with_suffix("").suffix, kind
    return kind, compression


def _open(file: str) -> IO[bytes]:
    if "://" not in file:
        return open(file, "rb")
    import fsspec  # what datasets and huggingface_hub open their files with

    content: IO[bytes] = fsspec.open(file, "rb").open()
    return content


def _unpacked(content: IO[bytes], compression: str) -> Any:
    if compression == ".zst":
        import pyarrow  # type: ignore[import-untyped]

        return pyarrow.input_stream(content, compression="zstd")
    opens: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opens[compression](content, "rb") if compression else content


def _read_text(lines: IO[str], sample_by: SampleBy) -> Iterator[str]:
    if sample_by == "document":
        yield lines.read()
    elif sample_by == "line":
        yield from (line.rstrip("\n") for line in lines if line.strip())
    else:
        for has_text, paragraph in itertools.groupby(lines, lambda line: bool(line.strip())):
            if has_text:
                yield "".join(paragraph).rstrip("\n")


def _read_json(lines: IO[str], file: str, text_field: str) -> Iterator[str]:
    """A .json file is one array of objects, or has one object a line, as C4 and Dolmino have it."""
    numbered = enumerate(lines, start=1)
    first = next(((number, line) for number, line in numbered if line.strip()), (0, ""))
    if not first[1].lstrip().startswith("["):
        yield from _read_lines(itertools.chain([first], numbered), file, text_field)
        return
    try:
        records = json.loads(first[1] + lines.read())
    except ValueError as error:
        raise ValueError(f"--dataset {file}: not a JSON array ({error}); repair or remove it") from None
    for number, record in enumerate(records, start=1):
        yield _text_of_object(record, text_field, f"{file}, record {number}")


def _read_lines(numbered: Iterable[tuple[int, str]], file: str, text_field: str) -> Iterator[str]:
    for number, line in numbered:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"--dataset {file}, line {number}: not JSON ({error}); repair or remove it (there must be one object a "
                "line, or in a .json file one array of objects)"
            ) from None
        yield _text_of_object(record, text_field, f"{file}, line {number}")


def _text_of_object(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"--dataset {where}: not an object with fields, like {{'text': ...}}")
    return text_of(record, text_field, where)


def _read_table(lines: IO[str], file: str, text_field: str, delimiter: str) -> Iterator[str]:
    csv.field_size_limit(sys.maxsize)  # a document may be longer than the 128 KiB that are usual
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        text_of(dict.fromkeys(header, ""), text_field, f"{file}, line 1")
        for row in rows:
            if row and len(row) != len(header):
                raise ValueError(
                    f"--dataset {file}, line {rows.line_num}: {len(row)} fields, its first line names {len(header)}; "
                    f"put text with {delimiter!r} or line ends in it between quotation marks"
                )
            if row:
                yield text_of(dict(zip(header, row, strict=True)), text_field, f"{file}, line {rows.line_num}")
    except csv.Error as error:
        raise ValueError(f"--dataset {file}, line {rows.line_num}: not a readable table ({error}); repair it") from None


def _read_columns(content: IO[bytes], file: str, text_field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import ipc, parquet

    kind = PurePath(file).suffix
    try:
        if kind.lower() == ".parquet":
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
    except pyarrow.ArrowException as error:
        raise ValueError(f"--dataset {file}: not a readable {kind} file ({error}); repair or remove it") from None
