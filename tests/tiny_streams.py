"""Small streams of documents, and the row of tokens that they must become, by a literal loop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from sparseforge_ds.data.batches import Batches, make_micro_batch
from sparseforge_ds.data.producer import ChunkSpec, ChunkWriter
from sparseforge_ds.data.splits import find_files
from sparseforge_ds.data.stream_chunks import ChunkSizes
from sparseforge_ds.data.streaming import StreamedWindows
from sparseforge_ds.data.text_files import LocalText
from sparseforge_ds.data.tokenization import cache_key
from sparseforge_ds.ranks import Ranks
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer

SIZES = ChunkSizes(seq_length=5, smallest=20, largest=80)
"""Chunks of 4, 8, 16, 16, 16, ... windows of 5 tokens."""


def texts(count: int = 60) -> list[str]:
    """Return documents of very different lengths, some of them blank."""
    return ["" if i % 7 == 3 else "  " if i % 11 == 5 else f"{i}:" + "abcdefghijk" * (i * i % 13) for i in range(count)]


def stream_of(folder: Path) -> LocalText:
    """Return the files of a folder as a stream."""
    return LocalText(f"stream:{folder}", find_files(folder), streamed=True)


def write_stream(folder: Path, documents: list[str] | None = None) -> LocalText:
    """Write documents into three files of a folder, and return them as a stream."""
    documents = texts() if documents is None else documents
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(3):
        lines = documents[part * len(documents) // 3 : (part + 1) * len(documents) // 3]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return stream_of(folder)


def chunk_spec(
    stream: LocalText, folder: Path, sizes: ChunkSizes = SIZES, vocabulary: int = BYTE_VOCABULARY
) -> ChunkSpec:
    """Return the recipe for the chunks of a stream of bytes."""
    return ChunkSpec(stream, byte_tokenizer(), folder, sizes, vocabulary)


def open_stream(
    stream: LocalText, folder: Path, seed: int, ranks: Ranks | None = None, sizes: ChunkSizes = SIZES
) -> StreamedWindows:
    """Return the windows of a stream of bytes as a run opens them; `folder` has all token caches."""
    key, facts = cache_key(stream, byte_tokenizer(), "auto", asdict(sizes))
    return StreamedWindows(chunk_spec(stream, folder / key, sizes), facts, seed, ranks or Ranks())


def ids_at(batches: Batches, position: int) -> Tensor:
    """Return the ids of a rank's next micro-batch after `position` sequences, and consume nothing."""
    return make_micro_batch(batches.rows_at(position), None).token_BS


def next_ids(batches: Batches) -> Tensor:
    """Consume a rank's next micro-batch, and return its ids."""
    ids = ids_at(batches, batches.position)
    batches.advance()
    return ids


def row_of(documents: list[str], count: int, frame: str = "auto") -> list[int]:
    """Return the first `count` tokens of the endless row of documents; after the last comes the first again."""
    tokenizer = byte_tokenizer()
    once: list[int] = []
    row: list[int] = []
    for text in documents:
        if text.strip():
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            once += {"auto": [256, *ids], "eos": [*ids, 257], "both": [256, *ids, 257]}[frame]
    while len(row) < count:
        row += once
    return row[:count]


class InPlace:
    """Producer without a process, so that a test can look at every position."""

    def __init__(self, spec):
        self.spec = spec
        self.requested = []

    def wait(self, chunk):
        writer = ChunkWriter(self.spec)
        while writer.finished <= chunk:
            writer.write_next()
        writer.chunks.check(chunk)
        return writer.chunks.record(chunk)

    def request(self, chunk):
        self.requested.append(chunk)
