"""A stream of documents as one endless row of tokens, which can be continued from any token on.

The documents are framed as in packing.py and follow each other; after the last comes the first again, so that the row
has no end. Where a row can be continued is a cursor, of JSON types:

    reader    where the next document is, in the reader's own terms
    tokens    tokens of that document that are used up
    sha256    of the text of that document, if one of its tokens is used up
    epoch     how often the last document has been passed
    skipped   documents without text before the next token, in all epochs
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.documents import Stream
from sparseforge_ds.data.packing import encode, token_dtype

_DOCUMENTS_AT_A_TIME = 256
_CHARACTERS_AT_A_TIME = 2**22
"""Documents are tokenised together up to one of these, so that a batch of books fits into memory."""

Cursor = dict[str, Any]


class TokenRow:
    """The row, from a cursor on.

    Args:
        stream: where the documents come from.
        tokenizer: their tokenizer.
        cursor: where to begin; None is the first token of the first document.
        frame: which of the tokenizer's tokens stand around every document.

    Raises:
        ValueError: the stream cannot be read, or is no longer what it was when the cursor was taken.
    """

    def __init__(
        self,
        stream: Stream,
        tokenizer: PreTrainedTokenizerBase,
        cursor: Cursor | None = None,
        frame: DocumentFrame = "auto",
    ) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._frame = frame
        self._dtype = token_dtype(tokenizer)
        self.epoch: int = 0 if cursor is None else cursor["epoch"]
        self._skipped: int = 0 if cursor is None else cursor.get("skipped", 0)  # earlier versions did not count them
        self._ends_without_token = 0
        self._reader = stream.read(None if cursor is None else cursor["reader"])
        self._places = [self._reader.state()]  # of every document of the batch, and of the one after it
        self._texts: list[str] = []
        self._ids: list[np.ndarray] = []
        self._document = 0
        self._token = 0
        if cursor is not None and cursor["tokens"]:
            self._read_batch()
            self._check(cursor)
            self._token = cursor["tokens"]

    def take(self, count: int) -> np.ndarray:
        """(count,) the next ids.

        Raises:
            ValueError: a document cannot be read, or no document has any text.
        """
        result = np.empty(count, dtype=self._dtype)
        filled = 0
        while filled < count:
            while self._document == len(self._ids):
                self._read_batch()
            self._skipped += len(self._ids[self._document]) == 0
            part = self._ids[self._document][self._token : self._token + count - filled]
            result[filled : filled + len(part)] = part
            filled += len(part)
            self._token += len(part)
            if self._token == len(self._ids[self._document]):
                self._document, self._token = self._document + 1, 0
        return result

    def cursor(self) -> Cursor:
        """Where the next token is."""
        digest = _digest(self._texts[self._document]) if self._token else None
        return {
            "reader": self._places[self._document],
            "tokens": self._token,
            "sha256": digest,
            "epoch": self.epoch,
            "skipped": self._skipped,
        }

    def _read_batch(self) -> None:
        """The next documents; none when the last was read before, and then the first comes next."""
        self._places, self._texts, characters = [self._reader.state()], [], 0
        while len(self._texts) < _DOCUMENTS_AT_A_TIME and characters < _CHARACTERS_AT_A_TIME:
            text = next(self._reader, None)
            if text is None:
                break
            self._texts.append(text)
            self._places.append(self._reader.state())
            characters += len(text)
        self._document = self._token = 0
        self._ids = [np.empty(0, dtype=self._dtype)] * len(self._texts)  # what a document without text stays
        used = [i for i, text in enumerate(self._texts) if text.strip()]
        if used:
            framed = encode([self._texts[i] for i in used], self._tokenizer, self._frame)
            for i, ids in zip(used, framed, strict=True):
                self._ids[i] = np.asarray(ids, dtype=self._dtype)
            self._ends_without_token = 0
        if not self._texts:
            self._ends_without_token += 1
            if self._ends_without_token == 2:
                raise ValueError(
                    f"--dataset {self._stream.name}: no document has any text; give another text, or name the field "
                    "that holds it with --text_field"
                )
            self._reader.rewind()
            self._places = [self._reader.state()]
            self.epoch += 1

    def _check(self, cursor: Cursor) -> None:
        if not self._ids or len(self._ids[0]) <= cursor["tokens"] or _digest(self._texts[0]) != cursor["sha256"]:
            raise self._changed()

    def _changed(self) -> ValueError:
        return ValueError(
            f"--dataset {self._stream.name} is no longer what the run began with: the document in which it stopped is "
            "another; bring the old text back, or start in a new --output_dir"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
