"""Windows of one source, each of S tokens, in an endless seeded order; and those of a text that is there whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


def token_ids(token: np.ndarray) -> np.ndarray:
    """The ids of tokens, a view; `tokenization.token_dtype` says what tokens are."""
    return token if token.dtype.names is None else token["f0"]


def trained_flags(token: np.ndarray) -> np.ndarray:
    """Which of the tokens are trained on, a view of booleans; only where `tokenization.token_dtype` has them."""
    trained: np.ndarray = token["f1"]
    return trained


def document_starts(token: np.ndarray) -> np.ndarray | None:
    """Which of the tokens are the first of a document, a view of booleans; None without `--document_attention`."""
    return token["f2"] if "f2" in (token.dtype.names or ()) else None


@dataclass(frozen=True)
class ReadProgress:
    """How far a source of text has been read."""

    name: str
    windows: int
    """Consumed by the run, over all ranks."""
    epochs: float
    """How often its end has been passed; of a text that is there whole, with the part of the present one."""
    skipped: int = 0
    """Documents without text that were passed while a stream was read."""


class Windows(Protocol):
    """An endless order of windows of one source: `CachedWindows` or `StreamedWindows`."""

    name: str
    """What users call the source."""
    key: str
    """Name of its tokens; a position in them is worth nothing in others."""
    seq_length: int
    """S."""
    seed: int
    """Seed of the order."""

    def summary(self, wanted: int) -> str:
        """What a run of `wanted` tokens of it reads, for the banner."""
        ...

    def prepare(self, first: int, stop: int) -> None:
        """Have the windows from `first` to before `stop` at hand. Every rank calls it with the same numbers.

        Raises:
            AgreedError: they cannot be made, or a rank cannot see them.
        """
        ...

    def window(self, sample: int) -> np.ndarray:
        """(S,) tokens of a window that is at hand: ids, perhaps with what `trained_flags` and `document_starts` get."""
        ...

    def state(self) -> dict[str, Any]:
        """The key, the facts that it stands for, and what is needed to find a position again, as JSON types."""
        ...

    def load(self, state: Mapping[str, Any], position: int) -> None:
        """Continue at `position`, with what `state` returned, here or of another text. Does not communicate.

        Raises:
            ValueError: `state` is damaged.
        """
        ...

    def reading(self, position: int) -> ReadProgress:
        """How far it has been read when the run has consumed `position` windows of it."""
        ...


class CachedWindows:
    """Window i is window `permutation(seed, epoch)[i]` of a text that is there whole; see `Windows`.

    Args:
        token: (tokens,) the packed text, in memory or mapped.
        key: name of the text.
        seq_length: S.
        seed: seed of the order.
        at_least: windows that the text must have.
        name: what users call it.
        facts: what the key stands for.
        counted: of its documents, for the banner.

    Raises:
        ValueError: the text is shorter than `at_least` windows.
    """

    def __init__(
        self,
        token: np.ndarray,
        key: str,
        seq_length: int,
        seed: int,
        at_least: int,
        name: str = "text",
        facts: Mapping[str, Any] | None = None,
        counted: str = "",
    ) -> None:
        self.windows = len(token) // seq_length
        if self.windows < at_least:
            raise ValueError(
                f"--dataset {name} has {len(token):,} tokens, {self.windows} windows of --seq_length {seq_length}: too "
                f"little for one batch of {at_least}; give more text, or shorter sequences"
            )
        self.token = token
        self.key = key
        self.seq_length = seq_length
        self.seed = seed
        self.name = name
        self.facts = dict(facts or {})
        self._counted = counted
        self._orders: dict[int, np.ndarray] = {}

    def summary(self, wanted: int) -> str:
        """See `Windows`."""
        tokens = len(self.token)
        return f"{self._counted}{tokens:,} tokens; the run reads {wanted:,} ({wanted / tokens:.2f} epochs)"

    def prepare(self, first: int, stop: int) -> None:
        """Nothing: all windows are at hand."""

    def window(self, sample: int) -> np.ndarray:
        """See `Windows`."""
        epoch, place = divmod(sample, self.windows)
        if epoch not in self._orders:
            # Two, because a mixture goes back and forth across the end of an epoch.
            self._orders = {other: order for other, order in self._orders.items() if abs(other - epoch) == 1}
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
        start = int(self._orders[epoch][place]) * self.seq_length
        return self.token[start : start + self.seq_length]

    def state(self) -> dict[str, Any]:
        """See `Windows`; with the position that is all."""
        return {"key": self.key, "facts": self.facts}

    def load(self, state: Mapping[str, Any], position: int) -> None:
        """Nothing."""

    def reading(self, position: int) -> ReadProgress:
        """See `Windows`."""
        return ReadProgress(self.name, position, position / self.windows)
