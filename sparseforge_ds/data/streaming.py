"""Windows of a stream: those of each chunk in a seeded order, chunk after chunk, while later chunks are being made.

The order is a function of the stream, the tokenizer, the frame of documents, the sequence length and the seed alone.
All ranks wait for a chunk together. A chunk that the producer cannot make is an error of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from sparseforge_ds.data.producer import ChunkSpec, Producer
from sparseforge_ds.data.stream_chunks import Record
from sparseforge_ds.data.windows import ReadProgress, Windows
from sparseforge_ds.ranks import Ranks

_OPEN = 8
"""Chunks that a rank keeps mapped, unless a batch needs more."""


class StreamedWindows(Windows):
    """Windows of a stream on this rank.

    Args:
        spec: recipe for the chunks, the same on every rank.
        facts: settings that the name of their folder was hashed from.
        seed: seed of the order.
        ranks: the processes of the run.
    """

    def __init__(self, spec: ChunkSpec, facts: Mapping[str, Any], seed: int, ranks: Ranks) -> None:
        self.key = spec.folder.name
        self.facts = facts
        self.seq_length = spec.sizes.seq_length
        self.seed = seed
        self.name = spec.source.name
        self.producer = Producer(spec) if ranks.first else None
        """Handle of the process that writes the chunks, on rank 0; None on other ranks."""
        self._sizes = spec.sizes
        self._ranks = ranks
        self._chunks = spec.chunks
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # tokens and order, least recently used first
        self._newest: tuple[int, Record] | None = None

    @override
    def summary(self, tokens: int) -> str:
        return f"tokenized while the run reads it; the run reads {tokens:,} tokens"

    @override
    def prepare(self, first: int, stop: int) -> None:
        """Wait until the chunks of the windows are written."""
        needed = range(self._sizes.locate(first)[0], self._sizes.locate(stop - 1)[0] + 1)
        for chunk in needed:
            self._open[chunk] = self._open.pop(chunk) if chunk in self._open else self._wait(chunk)
        for chunk in list(self._open)[: -max(_OPEN, len(needed))]:
            del self._open[chunk]

    @override
    def window(self, sample: int) -> np.ndarray:
        chunk, index = self._sizes.locate(sample)
        token, order = self._open[chunk]
        start = int(order[index]) * self.seq_length
        return token[start : start + self.seq_length]

    @override
    def state(self) -> dict[str, Any]:
        """Return also the record of the newest chunk that was read, which pins all tokens before it."""
        return {"key": self.key, "facts": dict(self.facts), "newest": self._newest}

    @override
    def load(self, state: Mapping[str, Any], position: int) -> None:
        """Request the chunk of `position`, and do not wait for it.

        Where the folder of chunks was lost, or the state is of another text, the stream is tokenized from its first
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
            self.producer.spec = dataclasses.replace(self.producer.spec, revision=revision)
            self.producer.request(self._sizes.locate(position)[0])

    @override
    def stop_waiting_if(self, should_stop: Callable[[], bool]) -> None:
        if self.producer is not None:
            self.producer.should_stop = should_stop

    @override
    def progress(self, position: int) -> ReadProgress:
        """Count also what was read ahead for the chunk after the newest."""
        record = self._newest[1] if self._newest else {"epoch": 0, "skipped": 0}
        return ReadProgress(self.name, position, float(record["epoch"]), record["skipped"])

    def _wait(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        record = self._ranks.on_first(lambda: self._wait_on_first(chunk))
        token = self._ranks.all_or_raise(lambda: self._chunks.open(chunk))
        if self._newest is None or chunk >= self._newest[0]:
            self._newest = (chunk, record)
        order = np.random.default_rng([self.seed, chunk]).permutation(self._sizes.windows(chunk))
        return token, order

    def _wait_on_first(self, chunk: int) -> Record:
        """Wait for a chunk on rank 0, and return its record. Refuse tokens that differ from the checkpoint's."""
        assert self.producer is not None
        record = self.producer.wait(chunk)
        if self._newest is None or chunk < self._newest[0]:
            return record
        # The newest chunk that was read pins all tokens before it, also where the next one is needed by now.
        newest, known = self._newest
        record_on_disk = record if chunk == newest else self._chunks.record(newest)
        if record_on_disk is not None and record_on_disk["sha256"] != known["sha256"]:
            raise ValueError(
                f"--dataset {self.name}: chunk {newest} of its tokens in {self._chunks.folder} differs from the one "
                "that the checkpoint was trained on: text, tokenizer or the version of tokenizers have changed; bring "
                "the old ones back, or start in a new --output_dir"
            )
        return record
