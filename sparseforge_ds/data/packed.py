"""A text that is tokenised whole before training starts: one file of ids, mapped into memory.

A finished cache is two files: `<key>.bin`, the ids as uint16 or uint32, each with a byte that says whether it is
trained on where not all are, and one that says whether it begins a document where attention stays inside documents; and
`<key>.json`, its record, which appears last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.checkpoint.disk import whole_file
from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.packing import cache_key, token_dtype, tokenise, without_text
from sparseforge_ds.data.text_files import Source
from sparseforge_ds.data.windows import ids_of, trained_of

_LEFTOVER_SECONDS = 600
"""A temporary file that nobody has written to for so long belongs to a run that was killed."""


@dataclass(frozen=True)
class Packed:
    """A finished cache."""

    path: str
    key: str
    dtype: str
    tokens: int
    documents: int
    largest_id: int
    skipped: int
    """Documents without any text."""
    trained: int | None
    """Tokens that are trained on; None for all."""
    facts: Mapping[str, Any]
    """What the key stands for."""

    def open(self) -> np.memmap:
        """(tokens,) of `token_dtype`, read only; errors as `open_tokens`."""
        return open_tokens(Path(self.path), self.dtype, self.tokens)

    def counted(self) -> str:
        """Of its documents, for the banner."""
        skipped = f" ({self.skipped:,} without text were skipped)" if self.skipped else ""
        loss = "" if self.trained is None else f"loss on {self.trained:,} of "
        return f"{self.documents:,} documents{skipped}, {loss}"


def open_tokens(path: Path, dtype: str, tokens: int) -> np.memmap:
    """(tokens,) of a file, read only.

    Raises:
        ValueError: this process cannot see the file.
    """
    try:
        return np.memmap(path, dtype=dtype, mode="r", shape=(tokens,))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: the token cache cannot be opened ({error}); --output_dir must be a folder that all "
            "machines of the run share"
        ) from error


def pack(source: Source, tokenizer: PreTrainedTokenizerBase, folder: Path, frame: DocumentFrame = "auto") -> Packed:
    """The token cache of a text, made if it is not there yet.

    Args:
        source: the text.
        tokenizer: its tokenizer.
        folder: where caches lie.
        frame: which of its tokens stand around every document.

    Raises:
        ValueError: the text cannot be read or is empty, or the tokenizer cannot frame documents so.
        OSError: the disk is full.
    """
    key, facts = cache_key(source, tokenizer, frame)
    record, path = folder / f"{key}.json", folder / f"{key}.bin"
    if record.exists():  # the folder may have moved, and the files may have other names now
        return Packed(**{**json.loads(record.read_text()), "path": str(path), "facts": facts})
    folder.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(tokenizer, *source.marks)
    marked = "," in dtype
    remove_leftovers(folder)
    tokens = count = largest = skipped = trained = 0
    with whole_file(path) as file:
        for batch in tokenise(source.read(), tokenizer, frame, *source.marks):
            file.write(batch.token.tobytes())
            tokens, count, skipped = tokens + len(batch.token), count + batch.documents, skipped + batch.skipped
            trained += int(np.count_nonzero(trained_of(batch.token))) if marked else 0
            largest = max(largest, int(ids_of(batch.token).max(initial=0)))
        if not tokens:
            raise without_text(source.name, skipped)
    packed = Packed(str(path), key, dtype, tokens, count, largest, skipped, trained if marked else None, facts)
    with whole_file(record) as file:
        file.write(json.dumps(asdict(packed)).encode())
    return packed


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs were writing."""
    for leftover in folder.glob("*.tmp"):
        if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
            leftover.unlink(missing_ok=True)
