"""The token cache of a stream: a folder of chunks that grows while the run goes on, and stays.

    chunk_000003.bin    tokens as in `token_cache`: a whole number of windows
    chunk_000003.json   its record, which appears last: from where in the text the next chunk goes on

The first chunks are small, so that training starts soon, and each is twice its predecessor up to the largest size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseforge_ds.checkpoint.disk import atomic_file
from sparseforge_ds.data.token_cache import open_tokens, remove_leftovers

Record = dict[str, Any]
"""What is known of a chunk, as JSON types.

reader   where the documents that were tokenised last begin, in the reader's own terms
began    epoch and skipped, below, when they did
used     how many of the tokens from there on the chunks have
epoch    how often the last document of the text has been passed, with what was read ahead for the next chunk
skipped  documents without text, in all epochs, likewise
sha256   of the chunks so far
"""
_FIELDS = ("reader", "began", "used", "epoch", "skipped", "sha256")


@dataclass(frozen=True)
class ChunkSizes:
    """How many windows of `seq_length` tokens each chunk has; a chunk is what is shuffled."""

    seq_length: int
    smallest: int = 2**18
    """Tokens of the first chunk, at most."""
    largest: int = 2**24

    def windows(self, chunk: int) -> int:
        """Windows of a chunk."""
        return max(1, self._size(chunk) // self.seq_length)

    def place(self, sample: int) -> tuple[int, int]:
        """The chunk that has the `sample`-th window of the stream, and which of its windows that is."""
        chunk = 0
        while self._size(chunk) < self.largest:
            if sample < self.windows(chunk):
                return chunk, sample
            sample -= self.windows(chunk)
            chunk += 1
        later, place = divmod(sample, self.windows(chunk))
        return chunk + later, place

    def _size(self, chunk: int) -> int:
        return min(self.smallest << min(chunk, 64), self.largest)


class Chunks:
    """The folder of one stream's chunks."""

    def __init__(self, folder: Path, sizes: ChunkSizes, dtype: str) -> None:
        self.folder = folder
        self.sizes = sizes
        self.dtype = dtype

    def prepare(self) -> None:
        """Make the folder, and remove what a killed writer left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def tokens(self, chunk: int) -> int:
        """Tokens of a chunk's windows."""
        return self.sizes.windows(chunk) * self.sizes.seq_length

    def finished(self) -> int:
        """How many chunks there are, without a gap."""
        there = {int(path.stem.removeprefix("chunk_")) for path in self.folder.glob("chunk_*.json")}
        return next(chunk for chunk in range(len(there) + 1) if chunk not in there)

    def open(self, chunk: int) -> np.memmap:
        """(tokens,) of a chunk that exists; errors as `open_tokens`."""
        return open_tokens(self._path(chunk, "bin"), self.dtype, self.tokens(chunk))

    def record(self, chunk: int) -> Record | None:
        """What is known of a chunk; None where there is none.

        Raises:
            ValueError: the file is damaged.
        """
        path = self._path(chunk, "json")
        try:
            content = json.loads(path.read_text())
            return {name: content[name] for name in _FIELDS}
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise self._damaged(path, repr(error)) from None

    def check(self, chunk: int) -> None:
        """Read a chunk that exists and compare its hash.

        Raises:
            ValueError: it is damaged.
        """
        record, path = self.record(chunk), self._path(chunk, "bin")
        content = path.read_bytes() if path.exists() else b""
        if record is None or self._digest(chunk, content) != record["sha256"]:
            raise self._damaged(path, "its hash is another")

    def write(self, chunk: int, token: np.ndarray, record: Record) -> None:
        """Write a chunk, the first that is not there yet: the tokens of its windows, then its record, without a hash.

        Raises:
            OSError: the disk is full.
        """
        content = token.tobytes()
        record = {**record, "sha256": self._digest(chunk, content)}
        for suffix, part in (("bin", content), ("json", json.dumps(record).encode())):
            with atomic_file(self._path(chunk, suffix)) as file:
                file.write(part)

    def _digest(self, chunk: int, content: bytes) -> str:
        before = (self.record(chunk - 1) or {}).get("sha256", "") if chunk else ""
        return hashlib.sha256(before.encode() + content).hexdigest()

    def _damaged(self, path: Path, how: str) -> ValueError:
        return ValueError(
            f"{path} is damaged ({how}); remove {self.folder}, which is made again from the text, and continue with "
            "--resume"
        )

    def _path(self, chunk: int, suffix: str) -> Path:
        return self.folder / f"chunk_{chunk:06d}.{suffix}"
