"""Token cache of a text that is tokenized before training starts: one file of tokens, mapped into memory.

A finished cache is two files:

    <key>.bin     tokens of `tokenization.token_dtype`: ids as uint16 or uint32, each with up to two bytes of flags
    <key>.json    its record, which appears last, with a checksum of every block of the first file

A launch compares the file's size and some of its blocks, all of them if it is small. A cache with other bytes than were
written is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.checkpoint.disk import atomic_file
from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.text_files import TextSource
from sparseforge_ds.data.tokenization import cache_key, no_text_error, token_batches, token_dtype
from sparseforge_ds.data.windows import ids_of_tokens, trained_flags

_LOG = logging.getLogger(__name__)
CHECKSUM_BLOCK = 2**20
"""Bytes of a block, which has one checksum."""
_SAMPLED = 62
"""Blocks that a launch compares, beside the first and the last."""
_CONTENT = "tokens"
"""Key in `TokenCache.facts` for a hash of the tokens."""
_LEFTOVER_SECONDS = 600
"""Age from which a temporary file counts as left by a killed run, since its last write."""


@dataclass(frozen=True)
class TokenCache:
    """Finished token cache."""

    path: str
    """Path of the .bin file."""
    key: str
    """Name of the files, from `tokenization.cache_key`."""
    dtype: str
    """`tokenization.token_dtype` of a token."""
    tokens: int
    documents: int
    """Documents with text."""
    largest_id: int
    skipped: int
    """Documents without text."""
    trained: int | None
    """Number of tokens that are trained on; None if all are."""
    facts: Mapping[str, Any]
    """Settings that the key was hashed from, and a hash of the tokens."""

    @property
    def name(self) -> str:
        """Name of these tokens. It has their hash: a chat template that chooses at random gives others."""
        return f"{self.key}-{self.facts[_CONTENT]}"

    def open(self) -> np.memmap:
        """Map the (tokens,) into memory, read only; errors as `open_tokens`."""
        return open_tokens(Path(self.path), self.dtype, self.tokens)

    def describe(self) -> str:
        """Return the number of documents and of trained tokens, for the banner."""
        skipped = f" ({self.skipped:,} without text were skipped)" if self.skipped else ""
        loss = "" if self.trained is None else f"loss on {self.trained:,} of "
        return f"{self.documents:,} documents{skipped}, {loss}"


def open_tokens(path: Path, dtype: str, tokens: int) -> np.memmap:
    """Map the (tokens,) of a file into memory, read only.

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
    source: TextSource, tokenizer: PreTrainedTokenizerBase, folder: Path, frame: DocumentFrame = "auto"
) -> TokenCache:
    """Return the token cache of a text. Tokenize the text if there is no intact cache yet.

    Args:
        source: the text.
        tokenizer: its tokenizer.
        folder: folder of all caches.
        frame: tokens around every document.

    Raises:
        ValueError: the text cannot be read or is empty, or the tokenizer lacks the tokens of the frame.
        OSError: the disk is full.
    """
    key, facts = cache_key(source, tokenizer, frame)
    record = folder / f"{key}.json"
    path = folder / f"{key}.bin"
    # 1. An intact cache is used as it is. A launch that was killed beside it may have left a file as large as it.
    if os.access(folder, os.W_OK):
        remove_leftovers(folder)
    if record.exists():
        try:
            return _read(record, path, facts)
        except ValueError as error:
            _LOG.warning("the token cache is made again from the text: %s", error)
    # 2. Tokens are written as they come, and counted.
    folder.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(tokenizer, *source.flags)
    has_flags = "," in dtype
    tokens = documents = largest = skipped = trained = 0
    checksums = _Checksums()
    with atomic_file(path) as file:
        for batch in token_batches(source.read(), tokenizer, frame, *source.flags):
            content = batch.token.tobytes()
            file.write(content)
            checksums.add(content)
            tokens += len(batch.token)
            documents += batch.documents
            skipped += batch.skipped
            trained += int(np.count_nonzero(trained_flags(batch.token))) if has_flags else 0
            largest = max(largest, int(ids_of_tokens(batch.token).max(initial=0)))
        if not tokens:
            raise no_text_error(source.name, skipped)
    # 3. The record appears last, so a cache without one is unfinished.
    block_checksums = checksums.finish()
    cache = TokenCache(
        path=str(path),
        key=key,
        dtype=dtype,
        tokens=tokens,
        documents=documents,
        largest_id=largest,
        skipped=skipped,
        trained=trained if has_flags else None,
        facts={**facts, _CONTENT: _hash_of(block_checksums)},
    )
    with atomic_file(record) as file:
        file.write(json.dumps({**asdict(cache), "checksums": block_checksums}).encode())
    return cache


class _Checksums:
    """CRC-32 of each block of `CHECKSUM_BLOCK` bytes of a stream of bytes."""

    def __init__(self) -> None:
        self._finished: list[str] = []
        self._crc = self._length = 0

    def add(self, content: bytes) -> None:
        """Take the next bytes of the stream."""
        rest = memoryview(content)
        while rest:
            part = rest[: CHECKSUM_BLOCK - self._length]
            rest = rest[len(part) :]
            self._crc = zlib.crc32(part, self._crc)
            self._length += len(part)
            if self._length == CHECKSUM_BLOCK:
                self._finished.append(f"{self._crc:08x}")
                self._crc = self._length = 0

    def finish(self) -> list[str]:
        """Return the checksum of each block, the last of which may be shorter."""
        return [*self._finished, f"{self._crc:08x}"] if self._length else self._finished


def _read(record: Path, path: Path, facts: Mapping[str, Any]) -> TokenCache:
    """Read the record of a cache, and compare the file with it.

    Path and facts are those of today: the folder may have moved, and the text files may have other names now.

    Raises:
        ValueError: the record is damaged, or the file is not as it was written.
    """
    try:
        content = json.loads(record.read_bytes())
        checksums = content.pop("checksums", None)
        cache = TokenCache(**{**content, "path": str(path)})
        size = cache.tokens * np.dtype(cache.dtype).itemsize
        has_checksums = isinstance(checksums, list) and len(checksums) == -(-size // CHECKSUM_BLOCK)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{record} is damaged ({error!r:.100})") from None
    if not has_checksums:
        raise ValueError(f"{record} has no checksums of {path.name}, or not those of its blocks")
    cache = replace(cache, facts={**facts, _CONTENT: _hash_of(checksums)})
    actual = path.stat().st_size if path.is_file() else 0
    if actual != size:
        raise ValueError(f"{path} has {actual:,} bytes instead of {size:,}")
    # Both ends are compared, and others by chance, so each launch looks at other blocks of a large file.
    middle = random.SystemRandom().sample(range(1, len(checksums) - 1), min(_SAMPLED, max(len(checksums) - 2, 0)))
    with path.open("rb") as file:
        for block in sorted({0, *middle, len(checksums) - 1}):
            file.seek(block * CHECKSUM_BLOCK)
            if f"{zlib.crc32(file.read(CHECKSUM_BLOCK)):08x}" != checksums[block]:
                raise ValueError(f"{path} has other bytes in block {block} than were written")
    return cache


def _hash_of(checksums: list[Any]) -> str:
    """Return a hash of all tokens from the checksums of their blocks."""
    return hashlib.sha256(json.dumps(checksums).encode()).hexdigest()[:16]


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed runs."""
    for leftover in folder.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # its own process has just finished it
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink()
