"""Windows of one source, each of S tokens, in an endless seeded order; and those of a cached text.

A token is an id, or an id with flags: `tokenization.token_dtype` has the numpy dtypes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override


def ids_of_tokens(token: np.ndarray) -> np.ndarray:
    """Return a view of the ids of tokens."""
    return token if token.dtype.names is None else token["f0"]


def trained_flags(token: np.ndarray) -> np.ndarray:
    """Return a view of the flags "trained on". Tokens without flags have none: check `dtype.names` before."""
    trained: np.ndarray = token["f1"]
    return trained


def document_starts(token: np.ndarray) -> np.ndarray | None:
    """Return a view of the flags "first of its document", or None without `--document_attention`."""
    return token["f2"] if "f2" in (token.dtype.names or ()) else None


@dataclass(frozen=True)
class ReadProgress:
    """Amount of one source that a run has read."""

    name: str
    """Name of the source, as in `--dataset`."""
    windows: int
    """Windows that the run has consumed, over all ranks."""
    epochs: float
    """Passes over the source. A stream counts whole passes, a cached text counts fractions too."""
    skipped: int = 0
    """Documents without text that were passed while a stream was read."""


class Windows(ABC):
    """Endless order of windows of one source: `CachedWindows` or `StreamedWindows`."""

    name: str
    """Name of the source, as in `--dataset`."""
    key: str
    """Name of the source's tokens. A position is valid for this key only."""
    seq_length: int
    """S."""
    seed: int
    """Seed of the order."""

    @abstractmethod
    def summary(self, tokens: int) -> str:
        """Return the banner's line about a run that reads so many tokens."""

    def prepare(self, first: int, stop: int) -> None:
        """Make the windows `first` to `stop - 1` available, if they are not. Every rank calls it with the same numbers.

        Raises:
            AgreedError: they cannot be made, or a rank cannot see them.
        """
        return

    @abstractmethod
    def window(self, sample: int) -> np.ndarray:
        """Return the (S,) tokens of a window that `prepare` made available."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the key, its facts, and whatever finds a position again, as JSON types."""

    def load(self, state: Mapping[str, Any], position: int) -> None:
        """Continue at `position`, from a `state()` of this or another text. Does not communicate.

        Raises:
            ValueError: `state` is damaged.
        """
        return

    def stop_waiting_if(self, should_stop: Callable[[], bool]) -> None:
        """Have `prepare` raise its error while it waits for text, once `should_stop` returns True on rank 0."""
        return

    @abstractmethod
    def progress(self, position: int) -> ReadProgress:
        """Return the progress after the run has consumed `position` windows."""


class CachedWindows(Windows):
    """Windows of a tokenized text, all available: window i is window `permutation(seed, epoch)[i]` of it.

    Args:
        token: (tokens,) the text, in memory or mapped.
        key: name of the text.
        seq_length: S.
        seed: seed of the order.
        at_least: windows that the text must have.
        name: name of the source, as in `--dataset`.
        facts: settings that the key was hashed from.
        description: number of documents, for the banner.

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
        description: str = "",
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
        self._description = description
        self._orders: dict[int, np.ndarray] = {}
        """Permutations of neighbouring epochs, by epoch."""

    @override
    def summary(self, tokens: int) -> str:
        available = len(self.token)
        epochs = tokens / available
        return f"{self._description}{available:,} tokens; the run reads {tokens:,} ({epochs:.2f} epochs)"

    @override
    def window(self, sample: int) -> np.ndarray:
        start = self.number_in_text(sample) * self.seq_length
        return self.token[start : start + self.seq_length]

    def number_in_text(self, sample: int) -> int:
        """Return the number of a window in the text, from 0 on."""
        epoch, index = divmod(sample, self.windows)
        if epoch not in self._orders:
            # Two epochs are kept, because a mixture goes back and forth across the end of an epoch.
            self._orders = {other: order for other, order in self._orders.items() if abs(other - epoch) == 1}
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
        return int(self._orders[epoch][index])

    @override
    def state(self) -> dict[str, Any]:
        return {"key": self.key, "facts": self.facts}

    @override
    def progress(self, position: int) -> ReadProgress:
        return ReadProgress(self.name, position, position / self.windows)
