"""Text to score: a file of any kind that training reads, a split of the embedded text, or WikiText-2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import load_dataset
from datasets.exceptions import DatasetsError

from sparseforge_ds.data.local_rows import load_rows
from sparseforge_ds.data.stdlib_text import Split, stdlib_file
from sparseforge_ds.data.text_formats import KINDS, is_plain_text, is_readable, iter_documents

STDLIB: dict[str, Split] = {"stdlib:heldout": "heldout", "stdlib:train": "train"}
WIKITEXT = "wikitext2"
"""`--text` of the split on the hub; `wikitext2:PATH` is a copy of its rows on this machine."""
_LONGEST_TEXT = 2**28
"""Largest number of characters of a .txt file, which is tokenized at once, in over 100 times as much memory."""
_HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")
_BUILDERS = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


def read_text(source: str, text_field: str, limit: int | None) -> list[str]:
    """Return the documents that `--text` names; WikiText-2 is one document."""
    if not is_wikitext2(source):
        return read_documents(source, text_field, limit)
    if limit is not None:
        raise ValueError(f"--limit {limit}: {WIKITEXT} is scored whole; leave the flag out")
    return [read_wikitext2(source, text_field)]


def documents_belong_together(source: str) -> bool:
    """Return whether the documents of a text belong together, as in a book."""
    return source in STDLIB or is_wikitext2(source) or is_plain_text(source)


def read_documents(source: str, text_field: str = "text", limit: int | None = None) -> list[str]:
    """Return the documents of a text that are not blank, at most `limit`.

    Args:
        source: a file (a .txt file is one document), `stdlib:heldout` or `stdlib:train`.
        text_field: field of a record that holds the text.
        limit: number of documents; None for all.
    """
    return list(islice(iter_texts(source, text_field), limit))


def iter_texts(source: str, text_field: str = "text") -> Iterator[str]:
    """Yield the documents of `read_documents`, one at a time; ValueError where there is none."""
    empty = True
    for number, document in enumerate(records(source, text_field), start=1):
        if not isinstance(document, str):
            raise ValueError(
                f"--text {source}, record {number}: a conversation or token ids; name another field by --text_field"
            )
        if document.strip():
            empty = False
            yield document
    if empty:
        raise ValueError(f"--text {source}: there is no text in it")


def records(source: str, text_field: str) -> Iterator[Any]:
    """Yield all records of a text, one at a time: documents, blank ones too, and conversations."""
    yield from iter_documents(str(text_file(source)), text_field, longest_text=_LONGEST_TEXT)


def text_file(source: str) -> Path:
    """Return the file that a `--text` names; ValueError where there is none that can be read."""
    path = stdlib_file(STDLIB[source]) if source in STDLIB else Path(source)
    if path.is_file() and is_readable(path.name):
        return path
    fault = "" if path.exists() else "no such file; "
    raise ValueError(f"--text {source}: {fault}give a file of {KINDS}, or one of {', '.join(STDLIB)}")


def is_wikitext2(source: str) -> bool:
    """Return whether a `--text` names WikiText-2."""
    return source == WIKITEXT or source.startswith(f"{WIKITEXT}:")


def require_text_field(texts: Iterable[str], text_field: str | None) -> None:
    """Reject a `--text_field` that was given where no text has records with fields."""
    if text_field is not None and all(map(is_plain_text, texts)):
        raise ValueError(f"--text_field {text_field}: no --text has records, whose field it could name; leave it out")


def read_wikitext2(source: str, text_field: str = "text") -> str:
    """Return the test split as the papers score it: all rows, blank ones too, joined by two newlines."""
    path = Path(source.removeprefix(WIKITEXT).removeprefix(":"))
    try:
        if source == WIKITEXT:
            rows = load_dataset(*_HUB, split="test")
        elif path.suffix in _BUILDERS:
            rows = load_rows(_BUILDERS[path.suffix], data_files=[str(path.absolute())], split="train")
        else:
            raise ValueError(f"give a file of {', '.join(_BUILDERS)}")
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
        raise ValueError(f"--text {source}: cannot be read ({reason})") from None
    if text_field not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise ValueError(f"--text {source}: its rows have no column {text_field!r} ({columns}); give --text_field")
    return "\n\n".join(row or "" for row in rows[text_field])
