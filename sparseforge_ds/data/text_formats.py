"""The documents of one file, plain or compressed, here or on the hub, as the builders of `datasets` read it.

Of a record only the text is used. So records of lines are parsed here, one at a time: the json builder of `datasets`
casts all of them to the fields of the first, and fails where they differ.
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
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from sparseforge_ds.config.arguments import LossOn, SampleBy
from sparseforge_ds.data.documents import Conversation, Document, PromptAndCompletion
from sparseforge_ds.data.local_rows import load_rows

_LINES = (".txt", ".jsonl", ".json")
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_COLUMNS = (".parquet", ".arrow")
_SUFFIXES = (*_COLUMNS, *(kind + compression for kind in _LINES for compression in ("", *_COMPRESSED)))
KINDS = f"{', '.join(_LINES)} (each also with {', '.join(_COMPRESSED)}), {', '.join(_COLUMNS)}"
"""The files that can be read, for people."""
_PIECE = 2**18
"""Characters that are read at a time, few because of each file of a folder the first record is looked at."""
_SPACE = re.compile(r"\s*")
LARGEST_DOCUMENT = 2**24
"""Bytes of a .txt file that is one document, and characters of a record. It is tokenised at once, with up to 160 times
as much memory: 2.6 GB."""
_WAITS = (1.0, 5.0, 30.0, 120.0, 300.0)
"""Seconds before each new attempt at a file of the hub, after the attempts that huggingface_hub makes by itself."""
_log = logging.getLogger(__name__)


def is_readable(name: str) -> bool:
    """Whether files of this name can be read."""
    return name.lower().endswith(_SUFFIXES)


def is_plain_text(name: str) -> bool:
    """Whether it is text without records."""
    return file_kind(name)[0] == ".txt"


def file_kind(file: str) -> tuple[str, str]:
    """('.jsonl', '.gz') of c4-train.00000.jsonl.gz."""
    kind, compression = PurePath(file.lower()).suffix, ""
    if kind in _COMPRESSED:
        kind, compression = PurePath(file.lower()).with_suffix("").suffix, kind
    return kind, compression


def check_size(file: str, size: int, largest: int = LARGEST_DOCUMENT) -> None:
    """Raise ValueError unless a .txt file is small enough to be one document."""
    if size > largest:
        raise ValueError(
            f"{file}: is one document of more than {largest:,} bytes, which would be tokenised at once, with over 100 "
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
    """The documents of one file, "" for each without text.

    Args:
        file: a path, or an address that fsspec knows, like hf://datasets/owner/name@revision/file.
        text_field: field of a record that holds the text or the messages of a conversation. Records without it may
            have `messages`, or `prompt` and `completion`.
        sample_by: what is a document of a .txt file: a line, a paragraph, or the file.
        loss_on: with `completion` plain text is refused.
        longest_text: characters of a .txt file that is one document; records have `LARGEST_DOCUMENT` at most.

    After a failure of the network it goes on with the next document.

    Raises:
        ValueError: it cannot be read, or has a record with something else than text, or one that is too long; the
            message names line or row.
    """
    import pyarrow
    from huggingface_hub import errors

    if "::" in file:
        raise ValueError(f"{file}: fsspec takes what stands behind :: for another file; rename it, or leave it out")
    gone = (FileNotFoundError, PermissionError, errors.RepositoryNotFoundError, errors.EntryNotFoundError)
    done, failures = 0, 0
    while True:
        try:
            for document in itertools.islice(_iter_documents(file, text_field, sample_by, longest_text), done, None):
                if loss_on == "completion" and _is_plain(document):
                    raise ValueError(
                        f"{file}, document {done + 1}: is plain text, which --loss_on completion cannot divide; give "
                        "records with messages, or with prompt and completion, or leave the flag out (a field that "
                        "holds messages is named by --text_field)"
                    )
                yield document
                done, failures = done + 1, 0
            return
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file}: not readable ({error}); save it as UTF-8 (iconv -f OLD -t UTF-8), or leave it out"
            ) from error
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, pyarrow.ArrowException, *gone) as error:
            raise _unreadable(file, done, error) from error
        except (OSError, errors.HTTPError) as error:
            if "://" not in file or failures == len(_WAITS):
                raise _unreadable(file, done, error) from error
            _log.info("%s, after %d documents: %s; trying again", file, done, error)
            time.sleep(_WAITS[failures])
            failures += 1


def _unreadable(file: str, done: int, error: Exception) -> ValueError:
    cure = "check the network and continue with --resume" if "://" in file else "repair the file or leave it out"
    where = f"{file}, after {done} documents" if done else file
    return ValueError(f"{where}: not readable ({error}); {cure}")


def _iter_documents(file: str, text_field: str, sample_by: SampleBy, longest_text: int) -> Iterator[Document]:
    kind = file_kind(file)[0]
    if kind in _COLUMNS:
        yield from _of_columns(file, kind, text_field)
    elif kind != ".txt":
        yield from _of_json(file, kind, text_field)
    elif sample_by == "document":
        yield _whole(file, longest_text)
    elif sample_by == "paragraph":
        yield from (text for text in _paragraphs(file) if text.strip())
    else:
        yield from (line for _, line in _lines(file) if line.strip())


def _rows(builder: str, file: str, **options: Any) -> Any:
    """The rows of a file as dicts, by a builder of `datasets`."""
    _register_zstd()
    name = file if "://" in file else glob.escape(file)
    return load_rows(builder, data_files={"train": [name]}, split="train", streaming=True, **options)


def _register_zstd() -> None:
    """Also where fsspec has one: that of the package zstandard reads a file that breaks off without an error."""
    import fsspec

    fsspec.compression.register_compression("zstd", _zstd, "zst", force=True)


def _zstd(content: Any, mode: str = "rb") -> Any:
    import pyarrow

    stream = pyarrow.input_stream if "r" in mode else pyarrow.output_stream
    return stream(content, compression="zstd")


def _opened(file: str) -> Any:
    """Return a context manager that opens a file, plain or compressed, as text."""
    import fsspec

    _register_zstd()
    return fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer")


def _lines(file: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file and their numbers, of which the first is 1. No more than the longest is in memory."""
    with _opened(file) as content:
        number = 1
        while line := content.readline(LARGEST_DOCUMENT + 1):
            if len(line) > LARGEST_DOCUMENT:
                raise _too_long(f"{file}, line {number}")
            yield number, line.rstrip("\n")
            number += 1


def _paragraphs(file: str) -> Iterator[str]:
    """Yield what empty lines divide."""
    lines: list[str] = []
    size = 0
    for number, line in itertools.chain(_lines(file), [(0, "")]):
        if line:
            lines.append(line)
            size += len(line) + 1
            if size > LARGEST_DOCUMENT:
                raise _too_long(f"{file}, the paragraph before line {number}")
        elif lines:
            yield "\n".join(lines)
            lines, size = [], 0


def _whole(file: str, longest: int) -> str:
    """Return all text of a file, if it is not too long."""
    with _opened(file) as content:
        text: str = content.read(longest + 1)
    if len(text) > longest:
        check_size(file, longest + 1, longest)
    return text


def _too_long(where: str) -> ValueError:
    return ValueError(
        f"{where}: has more than {LARGEST_DOCUMENT:,} characters, which would be tokenised at once, with over 100 "
        "times as much memory; divide it into several"
    )


def _of_json(file: str, kind: str, text_field: str) -> Iterator[Document]:
    """A .json file is one array of objects, or has one object a line, as C4 and Dolmino have it."""
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
    """Return whether the first character of a file that is no white space opens an array."""
    with _opened(file) as content:
        while piece := content.read(_PIECE):
            if text := piece.lstrip():
                return bool(text[0] == "[")
    return False


def _records_of_array(file: str) -> Iterator[Any]:
    """Yield the records of an array, which is often one long line. No more than one record, and a piece, is in memory.

    Raises ValueError for what is no array, from its first wrong record on.
    """
    decoder = json.JSONDecoder()
    text, at, number, wanted = "", 0, 1, "["
    with _opened(file) as content:
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches anything
            # 1. What stands before a record, between two, and after the last.
            if at < len(text) and wanted:
                if text[at] not in wanted:
                    raise _no_array(file, number, f"{text[at]!r} in the place of {' or '.join(wanted)}")
                if text[at] == "]":
                    if text[at + 1 :].strip() or content.read(_PIECE).strip():
                        raise _no_array(file, number, "something follows its end")
                    return
                wanted, at = "", at + 1
                continue
            if at < len(text) and text[at] == "]" and number == 1:
                wanted = "]"
                continue
            # 2. A record, if all of it is there.
            why: Exception | str = "it breaks off"
            if at < len(text):
                try:
                    record, end = decoder.raw_decode(text, at)
                except json.JSONDecodeError as error:  # it goes on behind the piece, or there is none
                    why = error
                except (ValueError, RecursionError) as error:  # a number of thousands of digits
                    raise _no_array(file, number, error) from None
                else:
                    if end - at > LARGEST_DOCUMENT:
                        raise _too_long(f"{file}, record {number}")
                    yield record
                    number, at, wanted = number + 1, end, ",]"
                    continue
            # 3. More of the file.
            text, at = text[at:], 0
            if len(text) > LARGEST_DOCUMENT:
                raise _too_long(f"{file}, record {number}")
            piece = content.read(max(_PIECE, len(text)))
            if not piece:
                raise _no_array(file, number, why)
            text += piece


def _no_array(file: str, number: int, why: object) -> ValueError:
    return ValueError(f"{file}: not a JSON array (record {number}: {why}); repair or remove it")


def _of_columns(file: str, kind: str, text_field: str) -> Iterator[Document]:
    try:
        rows = _rows(kind[1:], file, **({"batch_size": 2**10} if kind == ".parquet" else {}))
    except ValueError as error:
        if type(error) is not ValueError:  # of pyarrow, about damage
            raise
        # A column of a type that `datasets` does not have, like a map; it need not be one with text.
        raise ValueError(f"{file}: {error.args[0]}; write the columns with text to a file of their own") from None
    fields = _fields(list(rows.features), text_field, file)
    for number, row in enumerate(rows.select_columns(fields)):
        document = document_from_record(row, text_field, f"{file}, row {number}")
        if len(document) > LARGEST_DOCUMENT:
            raise _too_long(f"{file}, row {number}")
        yield document


def document_from_record(record: object, text_field: str, where: str) -> Document:
    """The document of a record; "" where its text is null.

    Raises:
        ValueError: it has no text.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not an object with fields, like {{'text': ...}}")
    fields = _fields(list(record), text_field, where)
    values: list[Any] = ["" if record[name] is None else record[name] for name in fields]
    if all(isinstance(value, str) for value in values):
        return PromptAndCompletion(*values) if len(values) > 1 else str(values[0])
    if all(map(_is_conversation, values)):
        prompt = len(values[0]) if len(values) > 1 else None
        messages = itertools.chain.from_iterable(values)
        return Conversation(tuple(_with_text(message, where) for message in messages), where, prompt)
    for name, value in zip(fields, values, strict=True):
        if not isinstance(value, str) and not _is_conversation(value):
            what = f"is {type(value).__name__}, not text nor a list of messages with a role and content"
            cure = "make it one of these, or name another field by --text_field"
            if _is_sharegpt(value):
                cure = (
                    "its messages have from and value, as ShareGPT's: write them as role (user for human, assistant "
                    "for gpt) and content"
                )
            raise ValueError(f"{where}: field {name!r} {what}; {cure}")
    raise ValueError(
        f"{where}: of prompt and completion one is text and the other a list of messages; make both text, or both "
        "messages"
    )


def _is_plain(document: Document) -> bool:
    return isinstance(document, str) and not isinstance(document, PromptAndCompletion) and bool(document.strip())


def _fields(names: Sequence[str], text_field: str, where: str) -> list[str]:
    """The fields that make a document, by the conventions of `datasets`."""
    for fields in ([text_field], ["messages"], ["prompt", "completion"]):
        if set(fields) <= set(names):
            return fields
    raise ValueError(
        f"{where}: no field {text_field!r}, nor messages, nor prompt and completion; name the one that holds "
        f"the text with --text_field (there are: {', '.join(map(str, names))})"
    )


def _with_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message whose content is text, or null beside a tool call: most chat templates print a list as it is."""
    content = message["content"]
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(
            f"{where}: the content of a message is {type(content).__name__} of more than text; remove what is no "
            "text, or name another field by --text_field"
        )
    return {**message, "content": content}


def _is_sharegpt(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and {"from", "value"} <= each.keys() for each in value
    )


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )
