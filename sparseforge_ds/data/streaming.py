"""Windows of a stream: the windows of a chunk in a seeded order, chunk after chunk, while later ones are being made.

The order is a function of the stream, the tokenizer, the frame of documents, the sequence length and the seed, and of
nothing else. All ranks wait for a chunk together, and what the producer cannot make is an error of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.producer import ChunkSpec, Producer
from sparseforge_ds.data.stream_chunks import ChunkSizes, Record
from sparseforge_ds.data.text_files import Source
from sparseforge_ds.data.tokenization import cache_key
from sparseforge_ds.data.windows import ReadProgress
from sparseforge_ds.ranks import Ranks

_OPEN = 8
"""Chunks that a rank has mapped at a time, unless a batch needs more."""


class StreamedWindows:
    """The windows of a stream on this rank; see `Windows`.

    Args:
        job: what makes the chunks, the same on every rank.
        facts: what the name of their folder stands for.
        seed: seed of the order.
        ranks: the processes of the run.
    """

    def __init__(self, job: ChunkSpec, facts: Mapping[str, Any], seed: int, ranks: Ranks) -> None:
        self.key = job.folder.name
        self.facts = facts
        self.seq_length = job.sizes.seq_length
        self.seed = seed
        self.name = job.source.name
        self.producer = Producer(job) if ranks.first else None
        """Has the process that makes the chunks, on rank 0."""
        self._sizes = job.sizes
        self._ranks = ranks
        self._chunks = job.chunks
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # tokens and order, least recently used first
        self._newest: tuple[int, Record] | None = None

    def summary(self, wanted: int) -> str:
        """See `Windows`."""
        return f"tokenised while the run reads it; the run reads {wanted:,} tokens"

    def prepare(self, first: int, stop: int) -> None:
        """See `Windows`; waits until they are made."""
        needed = range(self._sizes.place(first)[0], self._sizes.place(stop - 1)[0] + 1)
        for chunk in needed:
            self._open[chunk] = self._open.pop(chunk) if chunk in self._open else self._wait(chunk)
        for chunk in list(self._open)[: -max(_OPEN, len(needed))]:
            del self._open[chunk]

    def window(self, sample: int) -> np.ndarray:
        """See `Windows`."""
        chunk, place = self._sizes.place(sample)
        token, order = self._open[chunk]
        start = int(order[place]) * self.seq_length
        return token[start : start + self.seq_length]

    def state(self) -> dict[str, Any]:
        """See `Windows`; with the newest chunk that was read, whose record says what came before it."""
        return {"key": self.key, "facts": dict(self.facts), "newest": self._newest}

    def load(self, state: Mapping[str, Any], position: int) -> None:
        """See `Windows`; has the chunk of `position` made, and does not wait for it.

        Where the folder of chunks was lost, and of another text's state, the stream is tokenised from its first
        document up to the position.
        """
        newest = state.get("newest")
        try:
            self._newest = None if newest is None else (int(newest[0]), dict(newest[1]))
            revision = self._newest[1]["reader"].get("revision") if self._newest else None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the checkpoint's position in the stream is damaged ({error!r}); resume from another checkpoint"
            ) from None
        self._open.clear()
        if self.producer is not None:
            self.producer.job = dataclasses.replace(self.producer.job, revision=revision)
            self.producer.want(self._sizes.place(position)[0])

    def reading(self, position: int) -> ReadProgress:
        """See `Windows`; with what was read ahead for the chunk behind the newest."""
        record = self._newest[1] if self._newest else {"epoch": 0, "skipped": 0}
        return ReadProgress(self.name, position, float(record["epoch"]), record["skipped"])

    def _wait(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        record = self._ranks.on_first(lambda: self._made(chunk))
        token = self._ranks.all_or_raise(lambda: self._chunks.open(chunk))
        if self._newest is None or chunk >= self._newest[0]:
            self._newest = chunk, record
        order = np.random.default_rng([self.seed, chunk]).permutation(self._sizes.windows(chunk))
        return token, order

    def _made(self, chunk: int) -> Record:
        """The record of a chunk, when it is made and the checkpoint knows no other one of it."""
        assert self.producer is not None
        record = self.producer.wait(chunk)
        if self._newest is not None and self._newest[0] == chunk and self._newest[1]["sha256"] != record["sha256"]:
            raise ValueError(
                f"--dataset {self.name}: chunk {chunk} of its tokens in {self._chunks.folder} has come out differently "
                "from before: text, tokenizer or the version of tokenizers have changed; bring the old ones back, or "
                "start in a new --output_dir"
            )
        return record


def open_stream(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    sizes: ChunkSizes,
    vocabulary: int,
    seed: int,
    ranks: Ranks,
    frame: DocumentFrame = "auto",
) -> StreamedWindows:
    """The windows of a stream, at its beginning. Reads no text yet. Every rank calls it with the same arguments.

    Args:
        source: the text.
        tokenizer: its tokenizer.
        folder: where token caches lie.
        sizes: of the chunks.
        vocabulary: ids that the model knows.
        seed: seed of the order.
        ranks: the processes of the run.
        frame: which of the tokenizer's tokens stand around every document.

    Raises:
        AgreedError: the tokenizer cannot frame documents so.
    """
    key, facts = ranks.on_first(lambda: cache_key(source, tokenizer, frame, asdict(sizes)))
    return StreamedWindows(ChunkSpec(source, tokenizer, folder / key, sizes, vocabulary, frame), facts, seed, ranks)
