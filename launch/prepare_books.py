#!/usr/bin/env python3
"""Turn a folder of plain-text books into two JSONL files, for `studies/books.json`.

python launch/prepare_books.py $SPARSEFORGE_ASSETS/text/books runs/books --heldout Great-Expectations_1400.txt

Lines inside a paragraph are joined, as models of running text read them; a document is some 8 paragraphs.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

_PARAGRAPHS = 8


def documents(book: Path) -> list[str]:
    """Return the parts of a book, in order."""
    text = book.read_text(encoding="utf-8-sig")
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    paragraphs = [part for part in paragraphs if part]
    return ["\n\n".join(paragraphs[at : at + _PARAGRAPHS]) for at in range(0, len(paragraphs), _PARAGRAPHS)]


def main() -> None:
    """Write train.jsonl from the books, and heldout.jsonl from the one that is not trained on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--heldout", required=True, help="the file name of the book that is not trained on")
    arguments = parser.parse_args()
    books = sorted(arguments.books.glob("*.txt"))
    if arguments.books / arguments.heldout not in books:
        parser.error(f"--heldout {arguments.heldout}: {arguments.books} has {', '.join(book.name for book in books)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, chosen in (
        ("train", [book for book in books if book.name != arguments.heldout]),
        ("heldout", [arguments.books / arguments.heldout]),
    ):
        with (arguments.output / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for book in chosen:
                file.writelines(json.dumps({"text": text}) + "\n" for text in documents(book))


if __name__ == "__main__":
    main()
