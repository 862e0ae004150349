"""Text to score: a file of any kind that training reads, or a split of the embedded text, as a list of documents."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from sparseforge_ds.data.formats import KINDS, documents_of, is_readable
from sparseforge_ds.data.stdlib_text import Split, stdlib_file

STDLIB: dict[str, Split] = {"stdlib:heldout": "heldout", "stdlib:train": "train"}


def read_documents(source: str, text_field: str = "text", limit: int | None = None) -> list[str]:
    """The documents that have text of a file (a .txt file is one), `stdlib:heldout` or `stdlib:train`."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: use an integer >= 1")
    path = stdlib_file(STDLIB[source]) if source in STDLIB else Path(source)
    if not path.is_file() or not is_readable(path.name):
        raise ValueError(f"--text {source}: give a file of {KINDS}, or one of {', '.join(STDLIB)}")
    documents = []
    for number, document in enumerate(islice(documents_of(str(path), text_field), limit), start=1):
        if not isinstance(document, str):
            raise ValueError(f"--text {source}, record {number}: a conversation; name another field by --text_field")
        if document.strip():
            documents.append(document)
    if not documents:
        raise ValueError(f"--text {source}: there is no text in it")
    return documents
