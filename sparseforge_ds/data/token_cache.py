"""A text that is tokenised whole before training starts: one file of ids, mapped into memory.

A finished cache is two files: `<key>.bin`, the ids as uint16 or uint32, each with a byte that says whether it is
trained on where not all are, and one that says whether it begins a document where attention stays inside documents; and
`<key>.json`, its record, which appears last. The record has a checksum of every block of the file. A start compares its
size and some blocks, all of a small file, and makes a cache that is not as it was written again.
"""

from __future__ import annotations

import json
import logging
import random
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.checkpoint.disk import atomic_file
from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.text_files import Source
from sparseforge_ds.data.tokenization import cache_key, no_text_error, token_dtype, tokenise
from sparseforge_ds.data.windows import token_ids, trained_flags

_LOG = logging.getLogger(__name__)
_BLOCK = 2**20
"""Bytes that a checksum is of."""
_SAMPLED = 62
"""Blocks that a start compares, besides the first and the last."""
_LEFTOVER_SECONDS = 600
"""A temporary file that nobody has written to for so long belongs to a run that was killed."""


@dataclass(frozen=True)
class TokenCache:
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


def ensure_token_cache(
    source: Source, tokenizer: PreTrainedTokenizerBase, folder: Path, frame: DocumentFrame = "auto"
) -> TokenCache:
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
    if record.exists():
        try:
            return _read(record, path, facts)
        except ValueError as error:
            _LOG.warning("the token cache is made again from the text: %s", error)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(tokenizer, *source.marks)
    marked = "," in dtype
    remove_leftovers(folder)
    tokens = count = largest = skipped = trained = 0
    checksums = _Checksums()
    with atomic_file(path) as file:
        for batch in tokenise(source.read(), tokenizer, frame, *source.marks):
            content = batch.token.tobytes()
            file.write(content)
            checksums.add(content)
            tokens, count, skipped = tokens + len(batch.token), count + batch.documents, skipped + batch.skipped
            trained += int(np.count_nonzero(trained_flags(batch.token))) if marked else 0
            largest = max(largest, int(token_ids(batch.token).max(initial=0)))
        if not tokens:
            raise no_text_error(source.name, skipped)
    packed = TokenCache(str(path), key, dtype, tokens, count, largest, skipped, trained if marked else None, facts)
    with atomic_file(record) as file:
        file.write(json.dumps({**asdict(packed), "checksums": checksums.of_blocks()}).encode())
    return packed


class _Checksums:
    """CRC-32 of every block of `_BLOCK` bytes of what is written."""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._crc = self._length = 0

    def add(self, content: bytes) -> None:
        """Go on with the bytes that follow."""
        rest = memoryview(content)
        while rest:
            part = rest[: _BLOCK - self._length]
            rest = rest[len(part) :]
            self._crc, self._length = zlib.crc32(part, self._crc), self._length + len(part)
            if self._length == _BLOCK:
                self._whole.append(f"{self._crc:08x}")
                self._crc = self._length = 0

    def of_blocks(self) -> list[str]:
        """Return the checksum of each block, the last of which may be shorter."""
        return [*self._whole, f"{self._crc:08x}"] if self._length else self._whole


def _read(record: Path, path: Path, facts: Mapping[str, Any]) -> TokenCache:
    """Return a cache that is as it was written. The folder may have moved, and the text files have other names now.

    Raises:
        ValueError: how it differs.
    """
    try:
        content = json.loads(record.read_bytes())
        checksums = content.pop("checksums", None)
        packed = TokenCache(**{**content, "path": str(path), "facts": facts})
        size = packed.tokens * np.dtype(packed.dtype).itemsize
        sound = isinstance(checksums, list) and len(checksums) == -(-size // _BLOCK)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{record} is damaged ({error!r:.100})") from None
    if not sound:
        raise ValueError(f"{record} has no checksums of {path.name}, or not those of its blocks")
    there = path.stat().st_size if path.is_file() else 0
    if there != size:
        raise ValueError(f"{path} has {there:,} bytes instead of {size:,}")
    # Both ends, and others by chance: no two starts look at the same ones of a large file.
    middle = random.SystemRandom().sample(range(1, len(checksums) - 1), min(_SAMPLED, max(len(checksums) - 2, 0)))
    with path.open("rb") as file:
        for block in sorted({0, *middle, len(checksums) - 1}):
            file.seek(block * _BLOCK)
            if f"{zlib.crc32(file.read(_BLOCK)):08x}" != checksums[block]:
                raise ValueError(f"{path} has other bytes in block {block} than were written")
    return packed


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs were writing."""
    for leftover in folder.glob("*.tmp"):
        if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
            leftover.unlink(missing_ok=True)
