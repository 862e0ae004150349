"""Which tokens a rank sees when: the n-th sequence of a run is a window of one of its sources, by their turns.

The order belongs to the run, not to the ranks: the same position gives the same global batch at every world size, and
the state of the data is that position, with what streams need to find theirs again. Legend of shape suffixes: B
sequences, S tokens of a sequence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseforge_ds.config.run_state import differences, shorten
from sparseforge_ds.data.micro_batch import IGNORED, BatchLayout, MicroBatch
from sparseforge_ds.data.round_robin import RoundRobin
from sparseforge_ds.data.windows import ReadProgress, Windows, document_starts, token_ids, trained_flags
from sparseforge_ds.ranks import AgreedError

_log = logging.getLogger(__name__)


def make_micro_batch(row_BS: np.ndarray, trained: float | None) -> MicroBatch:
    """(B, S) tokens, see `tokenization.token_dtype`, as a micro-batch with its `trained`."""
    token_BS = label_BS = _ids(row_BS)
    if row_BS.dtype.names is not None:
        label_BS = token_BS.masked_fill(~torch.from_numpy(trained_flags(row_BS).copy()), IGNORED)
    more = (
        {} if (first_BS := document_starts(row_BS)) is None else {"position_ids": torch.from_numpy(positions(first_BS))}
    )
    return MicroBatch(token_BS, label_BS, trained, more)


def positions(first_BS: np.ndarray) -> np.ndarray:
    """(B, S) of every token in its document, or in the part of it that the sequence has.

    Args:
        first_BS: which tokens are the first of a document.
    """
    place_S = np.arange(first_BS.shape[1])
    begin_BS: np.ndarray = np.maximum.accumulate(np.where(first_BS, place_S, 0), axis=1)
    return place_S - begin_BS


class Batches:
    """An endless iterator over this rank's micro-batches, each (B, S) int64.

    Args:
        sources: the windows of every source, all of the same length and seed.
        parts: windows of each source in a round.
        layout: how a global batch is divided.
        takes_other_data: whether a state of another text is accepted, which is then said.
    """

    def __init__(
        self, sources: Sequence[Windows], parts: Sequence[int], layout: BatchLayout, takes_other_data: bool = False
    ) -> None:
        self.sources = list(sources)
        self.parts = list(parts)
        self.layout = layout
        self.takes_other_data = takes_other_data
        self.seq_length, self.seed = sources[0].seq_length, sources[0].seed
        self.position = 0
        """Sequences that the run has consumed, over all ranks."""
        self._turns = RoundRobin(parts)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Tensor:
        batch_BS = self.at(self.position)
        self.position += self.layout.at_once
        return batch_BS

    def step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next global batch, as `next` will give them; consumes nothing, as `at`."""
        return self.micro_batches(range(self.position, self.position + self.layout.global_batch))

    def micro_batches(self, batch: range) -> list[MicroBatch]:
        """This rank's part of consecutive sequences, whose mean loss is wanted; consumes nothing, as `at`.

        Args:
            batch: their positions, a multiple of those of a micro-batch of all ranks.
        """
        layout = self.layout
        trained = self.trained(batch)
        # At least one, so that the loss of a batch without any is 0.
        share = None if trained is None else max(1, trained) * layout.micro_batch / len(batch)
        found = []
        for position in batch[:: layout.at_once]:
            whole = make_micro_batch(self._rows(position), share)
            parts = layout.sequence_parallel
            found.append(whole if parts == 1 else whole.of(layout.part(self.seq_length), parts))
        return found

    def trained(self, batch: range) -> int | None:
        """How many tokens of some consecutive sequences are predicted and trained on; None where that is all.

        Every rank counts all of them, so that nothing is to be agreed on.
        """
        self.prepare(batch.start, len(batch))
        if self._window(batch.start).dtype.names is None:
            return None
        return sum(int(np.count_nonzero(trained_flags(self._window(position))[1:])) for position in batch)

    def at(self, position: int) -> Tensor:
        """This rank's (B, S) whole sequences when the run has consumed `position` sequences; consumes nothing.

        Every rank calls it with the same position: all wait together for a text that is still being tokenised.

        Raises:
            AgreedError: the text cannot be read any further.
        """
        return _ids(self._rows(position))

    def _rows(self, position: int) -> np.ndarray:
        """The same as tokens, see `tokenization.token_dtype`."""
        micro_batch = self.layout.micro_batch
        self.prepare(position, self.layout.at_once)
        first = position + self.layout.reader * micro_batch
        return np.stack([self._window(first + number) for number in range(micro_batch)])

    def _window(self, position: int) -> np.ndarray:
        source, window = self._turns.place(position)
        return self.sources[source].window(window)

    def window(self, position: int) -> Tensor:
        """(S,) int64 ids of one of the run's sequences, which `prepare` has at hand."""
        return _ids(self._window(position))

    def summary(self, steps: int) -> str:
        """What a run of so many steps reads, for its banner; of a mixture a line for every source."""
        wanted = steps * self.layout.global_batch * self.seq_length
        if len(self.sources) == 1:
            return f"{self.sources[0].name}: {self.sources[0].summary(wanted)}"
        shares = [part / sum(self.parts) for part in self.parts]
        lines = [
            f"{share:.2%} {source.name}: {source.summary(round(share * wanted))}"
            for source, share in zip(self.sources, shares, strict=True)
        ]
        return "\n".join(["shares of the tokens; a source that ends begins again", *lines])

    def prepare_step(self) -> None:
        """Have the whole next global batch at hand, so that text cannot end in the middle of a step.

        Raises:
            AgreedError: as `at`; or nothing of it is trained on.
        """
        self.require_trained(range(self.position, self.position + self.layout.global_batch))

    def require_trained(self, batch: range) -> None:
        """Raise an AgreedError where nothing of some consecutive sequences is trained on."""
        if self.trained(batch) == 0:
            raise AgreedError(
                "--loss_on completion, --document_attention: no token of the run's sequences "
                f"{batch.start:,} to {batch.stop - 1:,} is trained on; raise --global_batch or --seq_length (or "
                "curvature.sequences, where that is set), or leave the flag out"
            )

    def prepare(self, first: int, count: int) -> None:
        """Have so many of the run's sequences at hand. Every rank calls it with the same numbers; errors as `at`."""
        ranges = zip(self.sources, self._turns.before(first), self._turns.before(first + count), strict=True)
        for source, begin, end in ranges:
            if begin < end:
                source.prepare(begin, end)

    def reading(self) -> list[ReadProgress]:
        """How far every source of the text has been read."""
        counts = self._turns.before(self.position)
        return [source.reading(count) for source, count in zip(self.sources, counts, strict=True)]

    def scalars(self) -> dict[str, float]:
        """How far every source of the text has been read, tagged for the log."""
        result = {}
        for number, reading in enumerate(self.reading()):
            name = re.sub(r"[^\w.-]+", "_", reading.name).strip("_")
            tag = "data" if len(self.sources) == 1 else f"data/{number}_{name}"
            result[f"{tag}/tokens"] = float(reading.windows * self.seq_length)
            result[f"{tag}/epochs"] = reading.epochs
            if reading.skipped:
                result[f"{tag}/without_text"] = float(reading.skipped)
        return result

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in, as JSON types."""
        place = {"position": self.position, "seq_length": self.seq_length, "seed": self.seed, "parts": self.parts}
        return {**place, "sources": [source.state() for source in self.sources]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Does not communicate.

        Raises:
            ValueError: the state belongs to another text, which is not accepted, another sequence length or order.
        """
        for name, here in (("seq_length", self.seq_length), ("seed", self.seed)):
            if state[name] != here:
                raise ValueError(
                    f"the checkpoint was trained on other data ({name} {state[name]}, here {here}); "
                    f"resume with the same --{name}"
                )
        states, keys = state["sources"], [source.key for source in self.sources]
        if (state["parts"], [own["key"] for own in states]) != (self.parts, keys):
            self._take_other_data(state)
            states = [{}] * len(keys)
        self.position = int(state["position"])
        for source, own, count in zip(self.sources, states, self._turns.before(self.position), strict=True):
            source.load(own, count)

    def _take_other_data(self, state: Mapping[str, Any]) -> None:
        unlike = differences(_facts(state), _facts(self.state_dict()), "data")
        unlike = unlike or [f"keys were {[own['key'] for own in state['sources']]}"]
        if not self.takes_other_data:
            raise ValueError(
                f"the checkpoint was trained on other data ({shorten(unlike)}); resume with the same --dataset and "
                "flags, or go on with this text by --resume_other_data"
            )
        if self.layout.rank == 0:
            _log.info("--resume_other_data: goes on with another text than the checkpoint's: %s", shorten(unlike))


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the tokens of a state's text, by names that users know."""
    sources = {f"source{number}": own["facts"] for number, own in enumerate(state["sources"], start=1)}
    return {"shares": state["parts"], **sources}


def _ids(row_BS: np.ndarray) -> Tensor:
    return torch.from_numpy(token_ids(row_BS).astype(np.int64))
