"""Windows of a stream: the windows of a chunk in a seeded order, chunk after chunk, while later ones are being made.

The order is a function of the stream, the tokenizer, the frame of documents, the sequence length and the seed, and of
nothing else. All ranks wait for a chunk together, and what the producer cannot make is an error of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.batches import Reading
from sparseforge_ds.data.chunks import Chunks, Record, Sizes
from sparseforge_ds.data.documents import Stream
from sparseforge_ds.data.packing import cache_key, facts, token_dtype
from sparseforge_ds.data.producer import Job, Producer

T = TypeVar("T")

_OPEN = 8
"""Chunks that a rank has mapped at a time, unless a batch needs more."""


class Agreement(Protocol):
    """What ranks agree through (see ranks.py)."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        ...

    def all_or_raise(self, work: Callable[[], T]) -> T:
        """Do something on every rank, and raise on every rank what one rank raises."""
        ...

    def on_first(self, work: Callable[[], T]) -> T:
        """Do something on rank 0, and give its result or its error to every rank."""
        ...


@dataclass(frozen=True)
class Streamed:
    """A stream as tokens: where they lie, and what names them."""

    folder: str
    key: str
    dtype: str
    sizes: Sizes
    frame: DocumentFrame
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the key stands for."""

    def summary(self, wanted: int) -> str:
        """What a run of `wanted` tokens reads, for its banner."""
        return f"tokenised while the run reads it; the run reads {wanted:,} tokens"


def plan_stream(
    stream: Stream, tokenizer: PreTrainedTokenizerBase, folder: Path, sizes: Sizes, frame: DocumentFrame = "auto"
) -> Streamed:
    """Name a stream's tokens, in a folder below `folder`; reads nothing.

    Raises:
        ValueError: the tokenizer cannot frame documents so.
    """
    key, known = cache_key(stream, tokenizer, frame, asdict(sizes)), facts(stream, tokenizer, frame)
    return Streamed(str(folder / key), key, token_dtype(tokenizer), sizes, frame, known)


class StreamedWindows:
    """The windows of a stream, as `Batches` takes them.

    Args:
        streamed: the same on every rank.
        seed: seed of the order.
        ranks: the processes of the run.
        producer: what makes the chunks; on the first rank, and there only.
        name: what users call it.
    """

    def __init__(
        self, streamed: Streamed, seed: int, ranks: Agreement, producer: Producer | None, name: str = "text"
    ) -> None:
        assert (producer is not None) == ranks.first
        self.key = streamed.key
        self.facts = streamed.facts
        self.seq_length = streamed.sizes.seq_length
        self.seed = seed
        self.name = name
        self._sizes = streamed.sizes
        self._ranks = ranks
        self._producer = producer
        self._chunks = Chunks(Path(streamed.folder), streamed.sizes, streamed.dtype)
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # tokens and order, least recently used first
        self._newest: tuple[int, Record] | None = None

    def prepare(self, first: int, stop: int) -> None:
        """Have the windows from `first` to before `stop` at hand; waits until they are made.

        Raises:
            AgreedError: they cannot be made, or a rank cannot see them.
        """
        needed = range(self._sizes.place(first)[0], self._sizes.place(stop - 1)[0] + 1)
        for chunk in needed:
            self._open[chunk] = self._open.pop(chunk) if chunk in self._open else self._wait(chunk)
        for chunk in list(self._open)[: -max(_OPEN, len(needed))]:
            del self._open[chunk]

    def window(self, sample: int) -> np.ndarray:
        """(S,) ids."""
        chunk, place = self._sizes.place(sample)
        token, order = self._open[chunk]
        start = int(order[place]) * self.seq_length
        return token[start : start + self.seq_length]

    def state(self) -> dict[str, Any]:
        """The key, what it stands for, and the newest chunk that was read, which says what came before it."""
        return {"key": self.key, "facts": dict(self.facts), "newest": self._newest}

    def load(self, state: Mapping[str, Any], position: int) -> None:
        """Continue at `position`: have its chunk made, and do not wait for it.

        Where the folder of chunks was lost, and of another stream's state, the stream is tokenised from its first
        document up to the position.

        Raises:
            ValueError: `state` is not one of a stream.
        """
        newest = state.get("newest") if state.get("key") == self.key else None
        try:
            self._newest = None if newest is None else (int(newest[0]), dict(newest[1]))
            revision = self._newest[1]["reader"].get("revision") if self._newest else None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the checkpoint's position in the stream is damaged ({error!r}); resume from another checkpoint"
            ) from None
        self._open.clear()
        if self._producer is not None:
            self._producer.job = dataclasses.replace(self._producer.job, revision=revision)
            self._producer.want(self._sizes.place(position)[0])

    def reading(self, position: int) -> list[Reading]:
        """How far the stream has been read when the run has consumed `position` windows.

        Epochs and documents without text are those of the newest chunk, with what was read ahead for the next one.
        """
        record = self._newest[1] if self._newest else {"epoch": 0, "skipped": 0}
        return [Reading(self.name, position, float(record["epoch"]), record["skipped"])]

    def _wait(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        producer = self._producer
        record = self._ranks.on_first(lambda: self._known(chunk, producer.wait(chunk)) if producer is not None else {})
        token = self._ranks.all_or_raise(lambda: self._chunks.open(chunk))
        if self._newest is None or chunk >= self._newest[0]:
            self._newest = chunk, record
        order = np.random.default_rng([self.seed, chunk]).permutation(self._sizes.windows(chunk))
        return token, order

    def _known(self, chunk: int, record: Record) -> Record:
        """The record, if the checkpoint knows no other one of this chunk."""
        if self._newest is not None and self._newest[0] == chunk and self._newest[1]["sha256"] != record["sha256"]:
            raise ValueError(
                f"--dataset {self.name}: chunk {chunk} of its tokens in {self._chunks.folder} has come out differently "
                "from before: text, tokenizer or the version of tokenizers have changed; bring the old ones back, or "
                "start in a new --output_dir"
            )
        return record


def open_stream(
    streamed: Streamed,
    stream: Stream,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    seed: int,
    ranks: Agreement,
) -> StreamedWindows:
    """The windows of a stream on this rank, and on rank 0 the handle of the process that makes them.

    Args:
        streamed: from `plan_stream`, the same on every rank.
        stream: the text.
        tokenizer: its tokenizer.
        vocabulary: ids that the model knows.
        seed: seed of the order.
        ranks: the processes of the run.
    """
    job = Job(stream, tokenizer, Path(streamed.folder), streamed.sizes, vocabulary, streamed.frame)
    producer = Producer(job, lambda line: print(line, flush=True)) if ranks.first else None
    return StreamedWindows(streamed, seed, ranks, producer, stream.name)
