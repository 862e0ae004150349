"""Documents of one file, plain or compressed, on this machine or on the hub, as the builders of `datasets` read it.

Only the text of a record is used. Therefore lines of JSON are parsed here, one at a time: the json builder of
`datasets` casts all records to the fields of the first one, and fails where fields differ.
"""

from __future__ import annotations

import glob
import gzip
import itertools
import json
import logging
import lzma
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from sparseforge_ds.config.arguments import LossOn, SampleBy
from sparseforge_ds.data.documents import Document, PromptAndCompletion
from sparseforge_ds.data.local_rows import load_rows
from sparseforge_ds.data.text_records import TOKEN_FIELDS, TOOLS, document_from_record, present_conventions
from sparseforge_ds.data.token_documents import TokenDocument, iter_megatron

_LINES = (".txt", ".jsonl", ".json")
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_COLUMNS = (".parquet", ".arrow")
_INDEXED = ".idx"
_SUFFIXES = (*_COLUMNS, _INDEXED, *(kind + compression for kind in _LINES for compression in ("", *_COMPRESSED)))
KINDS = f"{', '.join(_LINES)} (each also with {', '.join(_COMPRESSED)}), {', '.join(_COLUMNS)}, {_INDEXED} (Megatron)"
"""Kinds of files that can be read, for messages."""
PIECE_CHARACTERS = 2**18
"""Characters that are read at a time. They are few, since the first record of every file of a folder is checked."""
_SPACE = re.compile(r"\s*")
_LONGEST_WORD = len("-Infinity")
"""Most characters before the end of a text at which an error of JSON may be due to the end: at a word of it."""
LARGEST_DOCUMENT = 2**24
"""Most bytes of a .txt file that is one document, and most characters of a record. A document is tokenized at once,
with up to 160 times as much memory: 2.6 GB."""
RETRY_SECONDS = (1.0, 5.0, 30.0, 120.0, 300.0)
"""Seconds before each new attempt to read a file of the hub, after those that huggingface_hub makes by itself."""
_log = logging.getLogger(__name__)


def is_readable(name: str) -> bool:
    """Return True if files of this name can be read."""
    return name.lower().endswith(_SUFFIXES)


def is_indexed(name: str) -> bool:
    """Return True if a file of this name is an index of Megatron, whose .bin file lies beside it."""
    return name.lower().endswith(_INDEXED)


def is_plain_text(name: str) -> bool:
    """Return True if a file of this name is text without records."""
    return file_kind(name)[0] == ".txt"


def file_kind(file: str) -> tuple[str, str]:
    """Return the suffixes of kind and compression: ('.jsonl', '.gz') for c4-train.00000.jsonl.gz."""
    path = PurePath(file.lower())
    if path.suffix in _COMPRESSED:
        return path.with_suffix("").suffix, path.suffix
    return path.suffix, ""


def check_size(file: str, size: int, largest: int = LARGEST_DOCUMENT) -> None:
    """Refuse a .txt file of `size` bytes that is too large to be one document."""
    if size > largest:
        raise ValueError(
            f"{file}: is one document of more than {largest:,} bytes, which would be tokenized at once, with over 100 "
            "times as much memory; divide it into several files (training also divides it by --sample_by paragraph or "
            "line)"
        )


def iter_documents(
    file: str,
    text_field: str,
    sample_by: SampleBy = "document",
    loss_on: LossOn = "all",
    longest_text: int = LARGEST_DOCUMENT,
) -> Iterator[Document]:
    """Yield the documents of one file, "" for each without text.

    After a failure of the network it waits, reads the file again, and continues with the next document.

    Args:
        file: a path, or an address that fsspec knows, like hf://datasets/owner/name@revision/file.
        text_field: field of a record that holds the text or the messages of a conversation. Records without it may
            have `messages`, `prompt` and `completion`, or `input_ids`.
        sample_by: unit of a .txt file that is one document: a line, a paragraph, or the whole file.
        loss_on: `completion` refuses plain text, and token ids without labels; `all` refuses labels that leave tokens
            out.
        longest_text: most characters of a .txt file that is one document; records have at most `LARGEST_DOCUMENT`.

    Raises:
        ValueError: the file cannot be read, or a record is too long or holds no text; the message names line or row.
    """
    import pyarrow
    from huggingface_hub import errors

    if "::" in file:
        raise ValueError(f"{file}: fsspec takes the part after :: for another file; rename it, or leave it out")
    gone = (FileNotFoundError, PermissionError, errors.RepositoryNotFoundError, errors.EntryNotFoundError)
    done = failures = 0
    while True:
        try:
            # After a failure, documents that were yielded before are skipped.
            for document in itertools.islice(
                iter_documents_once(file, text_field, sample_by, longest_text), done, None
            ):
                if loss_on == "completion" and _is_plain(document):
                    raise ValueError(
                        f"{file}, document {done + 1}: is plain text, which --loss_on completion cannot divide; give "
                        "records with messages, or with prompt and completion, or leave the flag out (--text_field "
                        "names a field that holds messages)"
                    )
                if isinstance(document, TokenDocument):
                    document.check_loss(loss_on)
                yield document
                done += 1
                failures = 0
            return
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file}: not readable ({error}); save it as UTF-8 (iconv -f OLD -t UTF-8), or leave it out"
            ) from error
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, pyarrow.ArrowException, *gone) as error:
            raise _unreadable(file, done, error) from error
        except (OSError, errors.HTTPError) as error:
            if "://" not in file or failures == len(RETRY_SECONDS):
                raise _unreadable(file, done, error) from error
            _log.info("%s, after %d documents: %s; trying again", file, done, error)
            time.sleep(RETRY_SECONDS[failures])
            failures += 1


def _unreadable(file: str, done: int, error: Exception) -> ValueError:
    cure = "check the network and continue with --resume" if "://" in file else "repair the file or leave it out"
    where = f"{file}, after {done} documents" if done else file
    return ValueError(f"{where}: not readable ({error}); {cure}")


def _is_plain(document: Document) -> bool:
    return isinstance(document, str) and not isinstance(document, PromptAndCompletion) and bool(document.strip())


def iter_documents_once(file: str, text_field: str, sample_by: SampleBy, longest_text: int) -> Iterator[Document]:
    """Yield the documents of one file as `iter_documents` does; errors of the network are the caller's."""
    kind = file_kind(file)[0]
    if kind == _INDEXED:
        yield from iter_megatron(file, LARGEST_DOCUMENT)
    elif kind in _COLUMNS:
        yield from _iter_columns(file, kind, text_field)
    elif kind != ".txt":
        yield from _iter_json(file, kind, text_field)
    elif sample_by == "document":
        yield _read_all(file, longest_text)
    elif sample_by == "paragraph":
        yield from (text for text in _paragraphs(file) if text.strip())
    else:
        yield from (line for _, line in _lines(file) if line.strip())


def _rows(builder: str, file: str, **options: Any) -> Any:
    """Return the rows of a file as dicts, by a builder of `datasets`."""
    _register_zstd()
    name = file if "://" in file else glob.escape(file)
    return load_rows(builder, data_files={"train": [name]}, split="train", streaming=True, **options)


def _register_zstd() -> None:
    """Replace fsspec's zstd: that of the package zstandard reads a truncated file without an error."""
    import fsspec

    fsspec.compression.register_compression("zstd", _zstd, "zst", force=True)


def _zstd(content: Any, mode: str = "rb") -> Any:
    import pyarrow

    stream = pyarrow.input_stream if "r" in mode else pyarrow.output_stream
    return stream(content, compression="zstd")


def _open_text(file: str) -> Any:
    """Return a context manager that opens a file, plain or compressed, as text."""
    import fsspec

    _register_zstd()
    return fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer")


def _lines(file: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) from 1 on. No more than one line is in memory, and a line that is too long is refused."""
    with _open_text(file) as content:
        number = 1
        while line := content.readline(LARGEST_DOCUMENT + 1):
            if len(line) > LARGEST_DOCUMENT:
                raise _too_long(f"{file}, line {number}")
            yield number, line.rstrip("\n")
            number += 1


def _paragraphs(file: str) -> Iterator[str]:
    """Yield the paragraphs of a file: runs of lines between empty lines."""
    lines: list[str] = []
    size = 0
    # An empty line after the last one ends the last paragraph.
    for number, line in itertools.chain(_lines(file), [(0, "")]):
        if line:
            lines.append(line)
            size += len(line) + 1
            if size > LARGEST_DOCUMENT:
                raise _too_long(f"{file}, the paragraph before line {number}")
        elif lines:
            yield "\n".join(lines)
            lines = []
            size = 0


def _read_all(file: str, longest: int) -> str:
    """Return all text of a file; refuse more than `longest` characters."""
    with _open_text(file) as content:
        text: str = content.read(longest + 1)
    if len(text) > longest:
        check_size(file, longest + 1, longest)
    return text


def _too_long(where: str) -> ValueError:
    return ValueError(
        f"{where}: has more than {LARGEST_DOCUMENT:,} characters, which would be tokenized at once, with over 100 "
        "times as much memory; divide it into several"
    )


def _iter_json(file: str, kind: str, text_field: str) -> Iterator[Document]:
    """Yield the documents of JSON lines, or of a .json file that is one array; C4 and Dolmino have lines in .json."""
    if kind == ".json" and _is_array(file):
        for number, record in enumerate(_records_of_array(file), start=1):
            yield document_from_record(record, text_field, f"{file}, record {number}")
        return
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{file}, line {number}: not JSON ({error}); repair or remove it (there must be one object a "
                "line, or in a .json file one array of objects)"
            ) from None
        yield document_from_record(record, text_field, f"{file}, line {number}")


def _is_array(file: str) -> bool:
    """Return True if the first character of a file that is no white space opens an array."""
    with _open_text(file) as content:
        while piece := content.read(PIECE_CHARACTERS):
            if text := piece.lstrip():
                return bool(text[0] == "[")
    return False


def _records_of_array(file: str) -> Iterator[Any]:
    """Yield the records of a JSON array, which is often one long line, with one record in memory at a time.

    Raises:
        ValueError: the file is no array; sound records before the first wrong one have been yielded.
    """
    decoder = json.JSONDecoder()
    text = ""  # the part of the file that is in memory
    at = 0  # position in it
    number = 1  # of the next record
    expected = "["  # characters that may follow; empty: a record
    with _open_text(file) as content:
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches anything
            # 1. A bracket or comma before a record, between two, or after the last.
            if at < len(text) and expected:
                if text[at] not in expected:
                    raise _no_array(file, number, f"{text[at]!r} in the place of {' or '.join(expected)}")
                if text[at] == "]":
                    if text[at + 1 :].strip() or content.read(PIECE_CHARACTERS).strip():
                        raise _no_array(file, number, "something follows its end")
                    return
                expected = ""
                at += 1
                continue
            if at < len(text) and text[at] == "]" and number == 1:
                expected = "]"
                continue
            # 2. A record, if all of it is in memory.
            why: Exception | str = "it breaks off"
            if at < len(text):
                try:
                    record, end = decoder.raw_decode(text, at)
                except json.JSONDecodeError as error:  # more of the file may complete it
                    why = error
                except (ValueError, RecursionError) as error:  # a number of thousands of digits
                    raise _no_array(file, number, error) from None
                else:
                    if end - at > LARGEST_DOCUMENT:
                        raise _too_long(f"{file}, record {number}")
                    yield record
                    number += 1
                    at = end
                    expected = ",]"
                    continue
            # 3. More of the file. It completes a string, but mends no mistake before the last word of the text.
            if len(text) - at > LARGEST_DOCUMENT:
                is_cut = not isinstance(why, json.JSONDecodeError) or why.pos >= len(text) - _LONGEST_WORD
                if not is_cut and "Unterminated string" not in str(why):
                    raise _no_array(file, number, why)
                raise _too_long(f"{file}, record {number}")
            text = text[at:]
            at = 0
            piece = content.read(max(PIECE_CHARACTERS, len(text)))
            if not piece:
                raise _no_array(file, number, why)
            text += piece


def _no_array(file: str, number: int, why: object) -> ValueError:
    return ValueError(f"{file}: not a JSON array (record {number}: {why}); repair or remove it")


def _iter_columns(file: str, kind: str, text_field: str) -> Iterator[Document]:
    """Yield the documents of a parquet or arrow file."""
    try:
        rows = _rows(kind[1:], file, **({"batch_size": 2**10} if kind == ".parquet" else {}))
    except ValueError as error:
        if type(error) is not ValueError:  # a class of pyarrow, about damage
            raise
        # Some column, perhaps not the text, has a type that `datasets` does not know, like a map.
        raise ValueError(f"{file}: {error.args[0]}; write the columns with text to a file of their own") from None
    # A row may have its text by another convention than the next one.
    conventions = present_conventions(list(rows.features), text_field, file)
    optional_fields = [TOOLS, *(TOKEN_FIELDS if TOKEN_FIELDS[:1] in conventions else ())]
    names = [*itertools.chain.from_iterable(conventions), *(name for name in optional_fields if name in rows.features)]
    for number, row in enumerate(rows.select_columns(list(dict.fromkeys(names)))):
        # Columns give an object the keys of all others, as null.
        record = {name: value if name in TOKEN_FIELDS else _without_nulls(value) for name, value in row.items()}
        document = document_from_record(record, text_field, f"{file}, row {number}")
        if len(document) > LARGEST_DOCUMENT:
            raise _too_long(f"{file}, row {number}")
        yield document


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys of objects in lists that are null; a message keeps its content."""
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None or key == "content"}
    return value
