"""Windows of a stream: the windows of a chunk in a seeded order, chunk after chunk, while later ones are being made.

The order is a function of the stream, the tokenizer, the frame of documents, the sequence length and the seed, and of
nothing else. All ranks wait for a chunk together, and what the producer cannot make is an error of all ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.batches import Reading, differences
from sparseforge_ds.data.chunks import Chunks, Record, Sizes
from sparseforge_ds.data.documents import Stream
from sparseforge_ds.data.packing import facts, fingerprint, token_dtype
from sparseforge_ds.data.producer import KEEP, Job, Producer
from sparseforge_ds.data.token_row import Cursor

T = TypeVar("T")

_OPEN = 8
"""Chunks that a rank has mapped at a time, unless a batch needs more."""


class Agreement(Protocol):
    """What ranks agree through (see ranks.py)."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        ...

    def everywhere(self, work: Callable[[], T]) -> T:
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
    parts = [*fingerprint(stream, tokenizer, frame), asdict(sizes)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    known = facts(stream, tokenizer, frame)
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
        self._records: dict[int, Record] = {}
        self._passed = 0

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

    def passed(self, position: int) -> None:
        """Let go of the tokens that are far behind."""
        chunk = self._sizes.place(position)[0]
        if chunk > self._passed:
            self._passed = chunk
            self._records = {other: record for other, record in self._records.items() if other >= chunk - KEEP}
            if self._producer is not None:
                self._producer.discard(chunk - KEEP)

    def state(self) -> dict[str, Any]:
        """The records of the chunks around the position, so that it can be found again without those before."""
        chunks = {str(chunk): record for chunk, record in sorted(self._records.items())}
        return {"key": self.key, "facts": dict(self.facts), "chunks": chunks}

    def load(self, state: dict[str, Any], position: int) -> None:
        """Continue at `position`: have its chunk made, and do not wait for it.

        Of another stream's state it takes over what lies in files that both begin with. Without that the stream is
        tokenised from its first document up to the position.

        Raises:
            ValueError: `state` is not one of a stream.
        """
        # Earlier versions wrote down neither; then the text at the position will tell.
        before = state.get("facts")
        same = before is None or state.get("key", self.key) == self.key
        try:
            self._records = {
                int(chunk): dict(record)
                for chunk, record in state["chunks"].items()
                if same or _lies_in_common_files(record["end"], before or {}, self.facts)
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the checkpoint's position in the stream is damaged ({error!r}); resume from another checkpoint"
            ) from None
        self._passed = self._sizes.place(position)[0]
        self._open.clear()
        if self._producer is not None:
            self._producer.adopt(self._records)
            self._producer.discard(self._passed - KEEP)
            self._producer.want(self._passed)

    def reading(self, position: int) -> list[Reading]:
        """How far the stream has been read when the run has consumed `position` windows; counts whole epochs."""
        chunk = self._sizes.place(position)[0]
        known = [other for other in self._records if other <= chunk]
        # The chunk that comes next may not have been made yet; it starts where the one before it ends.
        newest = max(known, default=None)
        epochs = 0 if newest is None else self._records[newest]["start" if newest == chunk else "end"]["epoch"]
        skipped = 0 if newest is None else self._records[newest]["end"].get("skipped", 0)
        return [Reading(self.name, position, float(epochs), skipped)]

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """What the text of `state` has otherwise, as lines for people."""
        return differences(state.get("facts"), self.facts)

    def _wait(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        producer = self._producer
        self._records[chunk] = self._ranks.on_first(lambda: producer.wait(chunk) if producer is not None else {})
        token = self._ranks.everywhere(lambda: self._chunks.open(chunk))
        order = np.random.default_rng([self.seed, chunk]).permutation(self._sizes.windows(chunk))
        return token, order


def _lies_in_common_files(end: Cursor, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a cursor of one stream is one of another, because all files up to there are the same."""
    files, others = (list(facts.get("files", {}).values()) for facts in (before, now))
    how, other_how = ({name: fact for name, fact in facts.items() if name != "files"} for facts in (before, now))
    passed = end["reader"].get("file", len(files)) + 1
    return how == other_how and end["epoch"] == 0 and passed <= len(files) and files[:passed] == others[:passed]


def open_stream(
    streamed: Streamed,
    stream: Stream,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    seed: int,
    ranks: Agreement,
) -> StreamedWindows:
    """The windows of a stream on this rank; rank 0 starts the process that makes them.

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
