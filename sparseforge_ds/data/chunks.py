"""The token cache of a stream: a folder of chunks that grows while the run goes on.

    chunk_000003.bin    token ids as uint16 or uint32; whole or absent
    chunk_000003.json   its record: the cursors at which it starts and ends (see token_row.py), its hash; stays for good

A chunk has a whole number of windows and follows its predecessor without a gap, so no token is lost. The first chunks
are small, so that training starts soon, and each is twice its predecessor up to the largest size. A chunk that was
discarded can be made again from its record, and is checked against its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseforge_ds.checkpoint.disk import sync
from sparseforge_ds.data.packing import open_tokens

Record = dict[str, Any]
"""What is known of a chunk, as JSON types: tokens, dtype, start, end, sha256, largest_id."""

_LEFTOVER_SECONDS = 600
"""Age at which a temporary file belongs to nobody: a chunk is written in a moment."""


@dataclass(frozen=True)
class Sizes:
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

    def __init__(self, folder: Path, sizes: Sizes, dtype: str) -> None:
        self.folder = folder
        self.sizes = sizes
        self.dtype = dtype

    def prepare(self) -> None:
        """Make the folder, and remove what a killed writer left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*.tmp"):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink(missing_ok=True)

    def tokens(self, chunk: int) -> int:
        """Tokens of a chunk."""
        return self.sizes.windows(chunk) * self.sizes.seq_length

    def open(self, chunk: int) -> np.memmap:
        """(tokens,) the ids of a chunk that exists.

        Raises:
            ValueError: this process cannot see it.
        """
        return open_tokens(self._path(chunk, "bin"), self.dtype, self.tokens(chunk))

    def record(self, chunk: int) -> Record | None:
        """What is known of a chunk, whether its tokens are there or not.

        Raises:
            ValueError: the file is damaged.
        """
        path = self._path(chunk, "json")
        try:
            content = json.loads(path.read_text())
            return {name: content[name] for name in ("tokens", "dtype", "start", "end", "sha256", "largest_id")}
        except FileNotFoundError:
            return None
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({error!r}); remove {self.folder}, from which nothing is lost, and continue with "
                "--resume"
            ) from None

    def newest_before(self, chunk: int) -> int:
        """The newest chunk before `chunk` that has a record, or -1."""
        known = [int(path.stem.removeprefix("chunk_")) for path in self.folder.glob("chunk_*.json")]
        return max((other for other in known if other < chunk), default=-1)

    def whole(self, chunk: int) -> Record | None:
        """The record of a chunk whose tokens are there and are the right ones; reads them."""
        record, path = self.record(chunk), self._path(chunk, "bin")
        if record is None or not path.is_file() or path.stat().st_size != self._bytes(chunk):
            return None
        return record if hashlib.sha256(path.read_bytes()).hexdigest() == record["sha256"] else None

    def write(
        self, chunk: int, token: np.ndarray, start: dict[str, Any], end: dict[str, Any], keep: bool = True
    ) -> Record:
        """Write a chunk: its tokens, if they are to be kept, and then its record.

        Raises:
            ValueError: it was made before and came out differently.
            OSError: the disk is full.
        """
        assert len(token) == self.tokens(chunk)
        record = {
            "tokens": len(token),
            "dtype": self.dtype,
            "start": start,
            "end": end,
            "sha256": hashlib.sha256(token.tobytes()).hexdigest(),
            "largest_id": int(token.max()),
        }
        self.adopt(chunk, record, write=False)
        if keep:
            self._write(self._path(chunk, "bin"), token.tobytes())
        self.adopt(chunk, record)
        return record

    def adopt(self, chunk: int, record: Record, write: bool = True) -> None:
        """Take over what a checkpoint knows of a chunk, so that it can be made without those before it.

        Raises:
            ValueError: the folder knows another chunk of that number.
        """
        known = self.record(chunk)
        if known is not None and known["sha256"] != record["sha256"]:
            raise ValueError(
                f"chunk {chunk} of the token cache {self.folder} has come out differently from before: text, tokenizer "
                "or the version of tokenizers have changed; bring the old ones back, or start in a new --output_dir"
            )
        if known is None and write:
            self._write(self._path(chunk, "json"), json.dumps(record).encode())

    def discard(self, before: int) -> None:
        """Remove the tokens of the chunks before `before`, which can be made again."""
        for path in self.folder.glob("chunk_*.bin"):
            if int(path.stem.removeprefix("chunk_")) < before:
                path.unlink(missing_ok=True)

    def _bytes(self, chunk: int) -> int:
        return self.tokens(chunk) * np.dtype(self.dtype).itemsize

    def _path(self, chunk: int, suffix: str) -> Path:
        return self.folder / f"chunk_{chunk:06d}.{suffix}"

    def _write(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(self.folder)
