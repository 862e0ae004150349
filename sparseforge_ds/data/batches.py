"""Batches of a run: its n-th sequence is a window of one of the sources, by round-robin.

The order belongs to the run, not to the ranks: a position gives the same global batch at every world size. The state of
the data is that position, and the positions of streams. Legend of shape suffixes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparseforge_ds.config.run_state import differences, shorten
from sparseforge_ds.data.micro_batch import IGNORED, BatchLayout, MicroBatch
from sparseforge_ds.data.round_robin import RoundRobin
from sparseforge_ds.data.teacher_logits import TeacherLogits, stack_logits
from sparseforge_ds.data.windows import (
    CachedWindows,
    ReadProgress,
    Windows,
    document_starts,
    ids_of_tokens,
    trained_flags,
)
from sparseforge_ds.model.top_logits import TopLogits
from sparseforge_ds.ranks import AgreedError

_log = logging.getLogger(__name__)
_MOST_PASSED_OVER = 1000
"""Batches in a row without a trained token, after which the text counts as having none."""


def make_micro_batch(row_BS: np.ndarray, trained: float | None) -> MicroBatch:
    """Return a micro-batch of whole sequences.

    Args:
        row_BS: (B, S) tokens of `tokenization.token_dtype`.
        trained: divisor of the summed loss, see `MicroBatch.trained`.
    """
    token_BS = label_BS = torch.from_numpy(ids_of_tokens(row_BS).astype(np.int64))
    if row_BS.dtype.names is not None:
        label_BS = token_BS.masked_fill(~torch.from_numpy(trained_flags(row_BS).copy()), IGNORED)
    more = (
        {} if (first_BS := document_starts(row_BS)) is None else {"position_ids": torch.from_numpy(positions(first_BS))}
    )
    return MicroBatch(token_BS, label_BS, trained, more)


def positions(first_BS: np.ndarray) -> np.ndarray:
    """Return (B, S) the position of every token in its document; a document that is cut restarts with the sequence.

    Args:
        first_BS: (B, S) True for the first token of a document.
    """
    index_S = np.arange(first_BS.shape[1])
    begin_BS: np.ndarray = np.maximum.accumulate(np.where(first_BS, index_S, 0), axis=1)
    return index_S - begin_BS


class Batches:
    """This rank's micro-batches, without end.

    Args:
        sources: windows of every source, all of the same length and seed.
        parts: windows of each source in a round.
        layout: place of this rank in a global batch.
        takes_other_data: accept the state of another text, with a line in the log.
        teacher_logits: stored logits of every source, which are `CachedWindows` then; None for none.
    """

    def __init__(
        self,
        sources: Sequence[Windows],
        parts: Sequence[int],
        layout: BatchLayout,
        takes_other_data: bool = False,
        teacher_logits: Sequence[TeacherLogits] | None = None,
    ) -> None:
        self.sources = list(sources)
        self.parts = list(parts)
        self.layout = layout
        self.takes_other_data = takes_other_data
        self.teacher_logits = teacher_logits
        self.seq_length = sources[0].seq_length
        self.seed = sources[0].seed
        self.position = 0
        """Sequences that the run has consumed, over all ranks."""
        self._order = RoundRobin(parts)

    def divided_as(self, layout: BatchLayout) -> Batches:
        """Return the same text in other micro-batches. The two share their sources, and no position."""
        return Batches(self.sources, self.parts, layout, self.takes_other_data, self.teacher_logits)

    def advance(self) -> None:
        """Count this rank's next micro-batch, and those of all other ranks, as consumed."""
        self.position += self.layout.sequences_at_once

    def step(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next global batch, without consuming it."""
        return self.micro_batches(range(self.position, self.position + self.layout.global_batch))

    def micro_batches(self, batch: range, with_logits: bool = True) -> list[MicroBatch]:
        """Return this rank's micro-batches of consecutive sequences, without consuming them.

        Losses are divided such that their mean over ranks and micro-batches is the mean over all trained tokens.

        Args:
            batch: positions of the sequences, some micro-batches of all ranks.
            with_logits: False where nobody compares with stored logits; else a rank whose part is damaged raises alone.
        """
        layout = self.layout
        trained = self.count_trained(batch)
        # At least one, so that the loss of a batch without trained tokens is 0.
        divisor = None if trained is None else max(1, trained) * layout.micro_batch / len(batch)
        micro_batches = []
        for position in batch[:: layout.sequences_at_once]:
            sequences = make_micro_batch(self.rows_at(position), divisor)
            if with_logits:
                sequences = replace(sequences, top=self._top_logits(position))
            if layout.sequence_parallel > 1:
                sequences = sequences.take_tokens(layout.token_slice(self.seq_length), layout.sequence_parallel)
            micro_batches.append(sequences)
        return micro_batches

    def count_trained(self, batch: range) -> int | None:
        """Count the tokens of consecutive sequences that are predicted and trained on; None if all are.

        Every rank counts the tokens of all ranks, so that they need not agree on the number.
        """
        self.prepare(batch.start, len(batch))
        if self._window(batch.start).dtype.names is None:
            return None
        return sum(int(np.count_nonzero(trained_flags(self._window(position))[1:])) for position in batch)

    def rows_at(self, position: int) -> np.ndarray:
        """Return this rank's (B, S) tokens of the next micro-batch after `position` sequences, with their flags.

        Every rank calls it with the same position: all wait together for a text that is still being tokenized.

        Raises:
            AgreedError: the text cannot be read any further.
        """
        micro_batch = self.layout.micro_batch
        self.prepare(position, self.layout.sequences_at_once)
        first = position + self.layout.data_parallel_rank * micro_batch
        return np.stack([self._window(first + row) for row in range(micro_batch)])

    def _top_logits(self, position: int) -> TopLogits | None:
        """Return the teacher's logits of this rank's next micro-batch after `position` sequences."""
        if self.teacher_logits is None:
            return None
        first = position + self.layout.data_parallel_rank * self.layout.micro_batch
        rows = []
        for row in range(self.layout.micro_batch):
            source, sample = self._order.locate(first + row)
            windows = self.sources[source]
            assert isinstance(windows, CachedWindows)
            rows.append(self.teacher_logits[source].read(windows.number_in_text(sample)))
        return stack_logits(rows)

    def _window(self, position: int) -> np.ndarray:
        source, window = self._order.locate(position)
        return self.sources[source].window(window)

    def summary(self, steps: int) -> str:
        """Return the banner's lines about the text of a run of so many steps, one for every source of a mixture."""
        tokens = steps * self.layout.global_batch * self.seq_length
        if len(self.sources) == 1:
            return f"{self.sources[0].name}: {self.sources[0].summary(tokens)}"
        shares = [part / sum(self.parts) for part in self.parts]
        lines = [
            f"{share:.2%} {source.name}: {source.summary(round(share * tokens))}"
            for source, share in zip(self.sources, shares, strict=True)
        ]
        return "\n".join(["shares of the tokens; a source that ends begins again", *lines])

    def prepare_step(self) -> None:
        """Make the next global batch available, and move past batches without trained tokens.

        So text cannot end in the middle of a step. A run that has begun can change neither its batch nor its sequences,
        and therefore passes over a batch of which no token is trained on.

        Raises:
            AgreedError: as `rows_at`; or no token is trained on in the first batch, or in a thousand in a row.
        """
        size = self.layout.global_batch
        if self.position == 0:
            self.require_trained(range(size))
        first = self.position
        for _ in range(_MOST_PASSED_OVER):
            if self.count_trained(range(self.position, self.position + size)) != 0:
                return
            if self.layout.rank == 0:
                _log.info("no token of the %d sequences from %d on is trained on: passed over", size, self.position)
            self.position += size
        raise AgreedError(
            f"--loss_on completion, --document_attention: no token of {_MOST_PASSED_OVER:,} batches from sequence "
            f"{first:,} on is trained on; go on with other text, by --resume --resume_other_data"
        )

    def stop_waiting_if(self, should_stop: Callable[[], bool]) -> None:
        """See `Windows.stop_waiting_if`."""
        for source in self.sources:
            source.stop_waiting_if(should_stop)

    def require_trained(self, batch: range) -> None:
        """Raise an AgreedError if no token of some consecutive sequences is trained on."""
        if self.count_trained(batch) == 0:
            raise AgreedError(
                "--loss_on completion, --document_attention: no token of the run's sequences "
                f"{batch.start:,} to {batch.stop - 1:,} is trained on; raise --global_batch or --seq_length (or "
                "curvature.sequences, where that is set), or leave the flag out"
            )

    def prepare(self, first: int, count: int) -> None:
        """Make sequences of the run available. Every rank calls it with the same numbers; errors as `rows_at`."""
        begins = self._order.counts_before(first)
        ends = self._order.counts_before(first + count)
        for source, begin, end in zip(self.sources, begins, ends, strict=True):
            if begin < end:
                source.prepare(begin, end)

    def progress(self) -> list[ReadProgress]:
        """Return the progress in every source."""
        counts = self._order.counts_before(self.position)
        return [source.progress(count) for source, count in zip(self.sources, counts, strict=True)]

    def scalars(self) -> dict[str, float]:
        """Return the progress in every source as scalars of the log."""
        scalars = {}
        for number, progress in enumerate(self.progress()):
            name = re.sub(r"[^\w.-]+", "_", progress.name).strip("_")
            tag = "data" if len(self.sources) == 1 else f"data/{number}_{name}"
            scalars[f"{tag}/tokens"] = float(progress.windows * self.seq_length)
            scalars[f"{tag}/epochs"] = progress.epochs
            if progress.skipped:
                scalars[f"{tag}/without_text"] = float(progress.skipped)
        return scalars

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the text and order that it is valid for, as JSON types."""
        return {
            "position": self.position,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "parts": self.parts,
            "sources": [source.state() for source in self.sources],
            "teacher_logits": [logits.record.origin for logits in self.teacher_logits or ()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Does not communicate.

        Raises:
            ValueError: the state belongs to another sequence length or seed, or to another text that is not accepted.
        """
        # 1. Length and seed decide what a position means.
        for name, current in (("seq_length", self.seq_length), ("seed", self.seed)):
            if state[name] != current:
                raise ValueError(
                    f"the checkpoint was trained on other data ({name} {state[name]}, here {current}); "
                    f"resume with the same --{name}"
                )
        # 2. The text must be the same, unless another one is accepted.
        states = state["sources"]
        keys = [source.key for source in self.sources]
        if (state["parts"], [saved["key"] for saved in states]) != (self.parts, keys):
            self._take_other_data(state)
            states = [{}] * len(keys)
        # A teacher's stored logits belong to the text.
        elif state.get("teacher_logits", []) != self.state_dict()["teacher_logits"]:
            self._take_other_data(state)
        # 3. Every source goes to its part of the position.
        self.position = int(state["position"])
        counts = self._order.counts_before(self.position)
        for source, saved, count in zip(self.sources, states, counts, strict=True):
            source.load(saved, count)

    def _take_other_data(self, state: Mapping[str, Any]) -> None:
        """Refuse another text than the state's, or say that the run goes on with it."""
        changes = differences(_facts(state), _facts(self.state_dict()), "data")
        changes = changes or [f"keys were {[saved['key'] for saved in state['sources']]}"]
        if not self.takes_other_data:
            raise ValueError(
                f"the checkpoint was trained on other data ({shorten(changes)}); resume with the same --dataset and "
                "flags, or go on with this text by --resume_other_data"
            )
        if self.layout.rank == 0:
            _log.info("--resume_other_data: goes on with another text than the checkpoint's: %s", shorten(changes))


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the tokens of a state's text, by names that users know."""
    sources = {f"source{number}": saved["facts"] for number, saved in enumerate(state["sources"], start=1)}
    origins = state.get("teacher_logits", [])
    logits = {f"teacher_logits{number}": origin for number, origin in enumerate(origins, start=1)}
    return {"shares": state["parts"], **sources, **logits}
