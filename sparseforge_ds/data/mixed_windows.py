"""Windows of several texts in fixed shares, as one endless order.

Every window is of one source, so shares of windows are shares of tokens. Which source the n-th window of the run is of
depends on the shares alone, and so does which of its windows that is: a position of the run is a position in every
source, and the state is what the sources need besides that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseforge_ds.data.batches import Reading, Windows
from sparseforge_ds.data.packing import Packed
from sparseforge_ds.data.streaming import Streamed


@dataclass(frozen=True)
class Mixed:
    """The tokens of a mixture's sources: where each of them lies."""

    texts: tuple[Packed | Streamed, ...]
    names: tuple[str, ...]
    shares: tuple[float, ...]

    def summary(self, wanted: int) -> str:
        """What a run of `wanted` tokens reads, for its banner; a line a source."""
        lines = [
            f"{share:.2%} {name}: {text.summary(round(share * wanted))}"
            for text, name, share in zip(self.texts, self.names, self.shares, strict=True)
        ]
        return "\n".join(["shares of the tokens; a source that ends begins again", *lines])


def turns(parts: Sequence[int]) -> np.ndarray:
    """(sum(parts),) whose turn it is, in one round; smooth weighted round-robin, as web servers divide requests.

    At any moment every source has had its share of the turns, give or take less than two. It repeats with the round.

    Args:
        parts: turns of each source in a round.
    """
    part, credit = np.asarray(parts), np.zeros(len(parts), dtype=np.int64)
    order = np.zeros(sum(parts), dtype=np.int16)
    for turn in range(len(order)):
        credit += part
        order[turn] = credit.argmax()
        credit[order[turn]] -= len(order)
    return order


class MixedWindows:
    """The windows of a mixture, as `Batches` takes them.

    Args:
        sources: the windows of every source, all of the same length.
        parts: windows of each source in a round.
        seed: seed of the order in each source.
    """

    def __init__(self, sources: Sequence[Windows], parts: Sequence[int], seed: int) -> None:
        self.sources = list(sources)
        self.seq_length = sources[0].seq_length
        self.seed = seed
        self._parts = np.asarray(parts)
        self._turns = turns(parts)
        had = self._turns[:, None] == np.arange(len(parts))
        self._had = np.cumsum(had, axis=0, dtype=np.int32) - had  # before each turn of a round
        names = ["mixture", self._parts.tolist(), [source.key for source in sources]]
        self.key = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]

    def prepare(self, first: int, stop: int) -> None:
        """Have the windows from `first` to before `stop` at hand.

        Raises:
            AgreedError: they cannot be made, or a rank cannot see them.
        """
        for source, begin, end in zip(self.sources, self._before(first), self._before(stop), strict=True):
            if begin < end:
                source.prepare(int(begin), int(end))

    def place(self, sample: int) -> tuple[int, int]:
        """Which source the `sample`-th window of the run is of, and which of its windows that is."""
        source = int(self._turns[sample % len(self._turns)])
        return source, int(self._before(sample)[source])

    def window(self, sample: int) -> np.ndarray:
        """(S,) ids."""
        source, window = self.place(sample)
        return self.sources[source].window(window)

    def state(self) -> dict[str, Any]:
        """What the sources need to find a position again, and what they are."""
        sources = [source.state() for source in self.sources]
        return {"key": self.key, "parts": self._parts.tolist(), "sources": sources}

    def load(self, state: Mapping[str, Any], position: int) -> None:
        """Continue at `position`, with what `state` returned. Does not communicate.

        Raises:
            ValueError: `state` is not one of a mixture.
        """
        states = state.get("sources") if state.get("key") == self.key else [{} for _ in self.sources]
        if not isinstance(states, list) or len(states) != len(self.sources):
            raise ValueError("the checkpoint's position in the mixture is damaged; resume from another checkpoint")
        for source, own, begun in zip(self.sources, states, self._before(position), strict=True):
            source.load(own, int(begun))

    def reading(self, position: int) -> list[Reading]:
        """How far each source has been read when the run has consumed `position` windows."""
        counts = zip(self.sources, self._before(position), strict=True)
        return [reading for source, windows in counts for reading in source.reading(int(windows))]

    def _before(self, sample: int) -> np.ndarray:
        """(sources,) windows that each source has had before the `sample`-th of the run."""
        rounds, turn = divmod(sample, len(self._turns))
        return rounds * self._parts + self._had[turn]
