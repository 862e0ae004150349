"""The documents of one file, plain or compressed, here or on the hub, as the builders of `datasets` read it.

Of a record only the text is used. So records of lines are parsed here, one at a time: the json builder of `datasets`
casts all of them to the fields of the first, and fails where they differ.
"""

from __future__ import annotations

import glob
import gzip
import itertools
import json
import locale
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
_ARRAY = re.compile(r"\s*\[\s*")
_BYTE_ORDER_MARK = "\ufeff"
_WAITS = (1.0, 5.0, 30.0, 120.0, 300.0)
"""Seconds before each new attempt at a file of the hub, after the attempts that huggingface_hub makes by itself."""
_log = logging.getLogger(__name__)


def is_readable(name: str) -> bool:
    """Whether files of this name can be read."""
    return name.lower().endswith(_SUFFIXES)


def is_plain_text(name: str) -> bool:
    """Whether it is text without records."""
    return kind_of(name)[0] == ".txt"


def kind_of(file: str) -> tuple[str, str]:
    """('.jsonl', '.gz') of c4-train.00000.jsonl.gz."""
    kind, compression = PurePath(file.lower()).suffix, ""
    if kind in _COMPRESSED:
        kind, compression = PurePath(file.lower()).with_suffix("").suffix, kind
    return kind, compression


def documents_of(
    file: str, text_field: str, sample_by: SampleBy = "document", loss_on: LossOn = "all"
) -> Iterator[Document]:
    """The documents of one file, "" for each without text.

    Args:
        file: a path, or an address that fsspec knows, like hf://datasets/owner/name@revision/file.
        text_field: field of a record that holds the text or the messages of a conversation. Records without it may
            have `messages`, or `prompt` and `completion`.
        sample_by: what is a document of a .txt file: a line, a paragraph, or the file.
        loss_on: with `completion` plain text is refused.

    After a failure of the network it goes on with the next document.

    Raises:
        ValueError: it cannot be read, or has a record with something else than text; the message names line or row.
    """
    import pyarrow
    from huggingface_hub import errors

    if "::" in file:
        raise ValueError(f"{file}: fsspec takes what stands behind :: for another file; rename it, or leave it out")
    gone = (FileNotFoundError, PermissionError, errors.RepositoryNotFoundError, errors.EntryNotFoundError)
    done, failures = 0, 0
    while True:
        try:
            for document in itertools.islice(_documents_of(file, text_field, sample_by), done, None):
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


def _documents_of(file: str, text_field: str, sample_by: SampleBy) -> Iterator[Document]:
    kind = kind_of(file)[0]
    if kind in _COLUMNS:
        yield from _of_columns(file, kind, text_field)
    elif kind == ".txt":
        whole = sample_by == "document"
        yield from (
            text if whole else text.strip("\n") for text in _text(file, sample_by=sample_by) if whole or text.strip()
        )
    else:
        yield from _of_json(file, kind, text_field)


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


def _text(file: str, **options: Any) -> Iterator[str]:
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") != "utf8":  # `datasets` opens compressed and remote files in the locale's own
        raise ValueError(f"{file}: text would be read as {encoding}; set PYTHONUTF8=1 in the environment")
    rows = _rows("text", file, encoding="utf-8", chunksize=_PIECE, **options)
    for number, row in enumerate(rows):
        yield row["text"] if number else row["text"].removeprefix(_BYTE_ORDER_MARK)


def _of_json(file: str, kind: str, text_field: str) -> Iterator[Document]:
    """A .json file is one array of objects, or has one object a line, as C4 and Dolmino have it."""
    if kind == ".json" and (head := _head_of_array(file)) is not None:
        for number, record in enumerate(head, start=1):
            yield document_of(record, text_field, f"{file}, record {number}")
        whole = next(_text(file, sample_by="document"))
        try:
            records = json.loads(whole)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: not a JSON array ({error}); repair or remove it") from None
        for number, record in enumerate(records[len(head) :], start=len(head) + 1):
            yield document_of(record, text_field, f"{file}, record {number}")
        return
    lines = ((number, line) for number, line in enumerate(_text(file, sample_by="line"), start=1) if line.strip())
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{file}, line {number}: not JSON ({error}); repair or remove it (there must be one object a "
                "line, or in a .json file one array of objects)"
            ) from None
        yield document_of(record, text_field, f"{file}, line {number}")


def _head_of_array(file: str) -> list[Any] | None:
    """The first record of an array, in a list, which is empty where there is none; None of what is no array.

    Reads no more of the file than that takes: an array is often one long line.
    """
    import fsspec

    _register_zstd()
    text = ""
    with fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer") as content:
        while piece := content.read(max(_PIECE, len(text))):
            text += piece
            if (start := _ARRAY.match(text)) is None:
                if text.strip():
                    return None
                continue
            try:
                return [json.JSONDecoder().raw_decode(text, start.end())[0]]
            except RecursionError as error:
                raise ValueError(f"{file}, record 1: not JSON ({error}); repair or remove it") from None
            except ValueError:  # it goes on behind the piece, or there is none
                continue
    return [] if text.strip() else None


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
        yield document_of(row, text_field, f"{file}, row {number}")


def document_of(record: object, text_field: str, where: str) -> Document:
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
