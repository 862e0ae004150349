"""Token cache of a stream: a folder of chunks that grows while the run goes on, and stays.

    chunk_000003.bin    tokens of `tokenization.token_dtype`, a whole number of windows
    chunk_000003.json   its record, which appears last: the position in the text where the next chunk continues

The first chunks are small, so that training starts soon. Each is twice its predecessor, up to the largest size.
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
"""Record of a chunk, as JSON types.

reader   position of the first document of the last `TokenBatch` that was read, from `Reader.state()`
began    [epoch, skipped] at that position
used     tokens from that position on that this chunk and its predecessors hold
epoch    passes over the text so far, including what was read ahead for the next chunk
skipped  documents without text in all epochs, likewise
sha256   hash over this chunk and all before it
"""
_FIELDS = ("reader", "began", "used", "epoch", "skipped", "sha256")


@dataclass(frozen=True)
class ChunkSizes:
    """Sizes of the chunks of a stream. Windows are shuffled within a chunk."""

    seq_length: int
    """Tokens of a window."""
    smallest: int = 2**18
    """Most tokens of the first chunk, unless a single window has more."""
    largest: int = 2**24
    """Most tokens of any chunk, unless a single window has more."""

    def windows(self, chunk: int) -> int:
        """Return the number of windows of a chunk."""
        return max(1, self._size(chunk) // self.seq_length)

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the chunk that holds the stream's window `sample`, and the index of the window in the chunk."""
        chunk = 0
        while self._size(chunk) < self.largest:
            if sample < self.windows(chunk):
                return chunk, sample
            sample -= self.windows(chunk)
            chunk += 1
        # From here on all chunks have the same size.
        later, index = divmod(sample, self.windows(chunk))
        return chunk + later, index

    def _size(self, chunk: int) -> int:
        return min(self.smallest << min(chunk, 64), self.largest)


class Chunks:
    """Chunks of one stream, in a folder."""

    def __init__(self, folder: Path, sizes: ChunkSizes, dtype: str) -> None:
        self.folder = folder
        self.sizes = sizes
        self.dtype = dtype

    def prepare(self) -> None:
        """Make the folder, and remove temporary files of killed writers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def tokens(self, chunk: int) -> int:
        """Return the number of tokens of a chunk."""
        return self.sizes.windows(chunk) * self.sizes.seq_length

    def finished(self) -> int:
        """Return the number of finished chunks, up to the first gap."""
        numbers = {int(path.stem.removeprefix("chunk_")) for path in self.folder.glob("chunk_*.json")}
        return next(chunk for chunk in range(len(numbers) + 1) if chunk not in numbers)

    def open(self, chunk: int) -> np.memmap:
        """Map the (tokens,) of a finished chunk into memory; errors as `open_tokens`."""
        return open_tokens(self._path(chunk, "bin"), self.dtype, self.tokens(chunk))

    def record(self, chunk: int) -> Record | None:
        """Return the record of a chunk, or None if the chunk is not finished.

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
        """Read a finished chunk and compare its hash with the record.

        Raises:
            ValueError: it is damaged.
        """
        record = self.record(chunk)
        path = self._path(chunk, "bin")
        content = path.read_bytes() if path.exists() else b""
        if record is None or self._digest(chunk, content) != record["sha256"]:
            raise self._damaged(path, "its hash is another")

    def write(self, chunk: int, token: np.ndarray, record: Record) -> None:
        """Write the first chunk that is missing: its tokens, then its record, to which the hash is added.

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
