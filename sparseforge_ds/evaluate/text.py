"""Text to score: a file, or the held-out documents of the standard library, as a list of documents."""

from __future__ import annotations

import json
from pathlib import Path

STDLIB = ("stdlib:heldout", "stdlib:train")


def read_documents(source: str, field: str = "text", limit: int | None = None) -> list[str]:
    """The documents of `source`.

    Args:
        source: a .txt file (one document), a .jsonl file (one document a line), `stdlib:heldout` or `stdlib:train`.
        field: the field of a jsonl line that holds the text.
        limit: read only so many documents.

    Raises:
        ValueError: no such file, an unknown kind of file, a damaged line, or nothing in it.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: use an integer >= 1")
    if source in STDLIB:
        from sparseforge_ds.data.stdlib_text import stdlib_documents

        documents = list(stdlib_documents("heldout" if source.endswith("heldout") else "train"))[:limit]
    else:
        documents = _read_file(Path(source), field, limit)
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"--text {source}: there is no text in it")
    return documents


def _read_file(path: Path, field: str, limit: int | None) -> list[str]:
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"--text {path}: give a .txt or .jsonl file, or one of {', '.join(STDLIB)}")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: cannot be read ({error})") from None
    if path.suffix == ".txt":
        return [content]
    documents: list[str] = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        if len(documents) == limit:
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--text {path}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"--text {path}, line {number}: no text in field {field!r} (it has {fields}); use --field")
        documents.append(record[field])
    return documents
