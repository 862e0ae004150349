"""Windows of several texts in fixed shares, as one endless order.

Every window is of one source, so shares of windows are shares of tokens. Which source the n-th window of the run is of
depends on the shares and the seed alone, and so does which of its windows that is: a position of the run is a position
in every source, and the state is what the sources need besides that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseforge_ds.data.batches import Reading, Windows, differences
from sparseforge_ds.data.packing import Packed
from sparseforge_ds.data.streaming import Streamed

_SHUFFLED = 64
"""Windows whose turns are shuffled together, so that no source meets always the same rank or the same step."""


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
    """(sum(parts),) whose turn it is, in one round.

    After any number of turns every source has had its share of them, give or take less than one: the chairman
    assignment of R. Tijdeman (Discrete Mathematics 32, 1980). It repeats with the round.

    Args:
        parts: turns of each source in a round.
    """
    total, slack = sum(parts), 2 * len(parts) - 2
    had = [0] * len(parts)
    order = np.zeros(total, dtype=np.int16)
    for turn in range(1, total + 1):
        best, urgency = -1, 0.0
        for i, part in enumerate(parts):
            behind = part * turn - had[i] * total  # how far behind its share, in units of 1 / total
            # Not eligible: it would be ahead of its share by too much.
            if slack and slack * behind < total:
                continue
            deadline = (total * (slack - 1) - slack * behind) / part
            if best < 0 or deadline < urgency:
                best, urgency = i, deadline
        had[best] += 1
        order[turn - 1] = best
    assert tuple(had) == tuple(parts)
    return order


class MixedWindows:
    """The windows of a mixture, as `Batches` takes them.

    Args:
        sources: the windows of every source, all of the same length.
        parts: windows of each source in a round.
        seed: seed of the order.
    """

    def __init__(self, sources: Sequence[Windows], parts: Sequence[int], seed: int) -> None:
        self.sources = list(sources)
        self.seq_length = sources[0].seq_length
        self.seed = seed
        self._parts = np.asarray(parts)
        self._turns = turns(parts)
        had = np.zeros((len(self._turns) + 1, len(parts)), dtype=np.int32)
        had[np.arange(len(self._turns)) + 1, self._turns] = 1
        self._had = np.cumsum(had, axis=0, dtype=np.int32)  # before each turn of a round
        names = ["mixture", 1, _SHUFFLED, [int(part) for part in parts], [source.key for source in sources]]
        self.key = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]
        self._block = -1
        self._order = np.empty(0, dtype=np.int64)

    def prepare(self, first: int, stop: int) -> None:
        """Have the windows from `first` to before `stop` at hand.

        Raises:
            AgreedError: they cannot be made, or a rank cannot see them.
        """
        needed: dict[int, list[int]] = {}
        for sample in range(first, stop):
            source, window = self.place(sample)
            needed.setdefault(source, []).append(window)
        for source, windows in sorted(needed.items()):
            self.sources[source].prepare(min(windows), max(windows) + 1)

    def place(self, sample: int) -> tuple[int, int]:
        """Which source the `sample`-th window of the run is of, and which of its windows that is."""
        turn = self._shuffled(sample)
        return int(self._turns[turn % len(self._turns)]), int(self._before(turn)[self._turns[turn % len(self._turns)]])

    def window(self, sample: int) -> np.ndarray:
        """(S,) ids."""
        source, window = self.place(sample)
        return self.sources[source].window(window)

    def passed(self, position: int) -> None:
        """The sources let go of what is behind the block of turns that the run is in."""
        for source, begun in zip(self.sources, self._begun(position), strict=True):
            source.passed(int(begun))

    def state(self) -> dict[str, Any]:
        """What the sources need to find a position again, and what they are."""
        sources = [source.state() for source in self.sources]
        return {"key": self.key, "parts": self._parts.tolist(), "sources": sources}

    def load(self, state: dict[str, Any], position: int) -> None:
        """Continue at `position`, with what `state` returned. Does not communicate.

        Of another mixture's state each source takes over what it can, where there are as many.

        Raises:
            ValueError: `state` is not one of a mixture.
        """
        states = state.get("sources")
        if state.get("key", self.key) != self.key:
            if not isinstance(states, list) or len(states) != len(self.sources):
                states = [{} for _ in self.sources]
            states = [{"chunks": {}, **own} for own in states]
        if not isinstance(states, list) or len(states) != len(self.sources):
            raise ValueError("the checkpoint's position in the mixture is damaged; resume from another checkpoint")
        for source, own, begun in zip(self.sources, states, self._begun(position), strict=True):
            source.load(own, int(begun))

    def reading(self, position: int) -> list[Reading]:
        """How far each source has been read when the run has consumed `position` windows."""
        count = self._begun(position).copy()
        for sample in range(position // _SHUFFLED * _SHUFFLED, position):
            count[self.place(sample)[0]] += 1
        return [
            reading
            for source, windows in zip(self.sources, count, strict=True)
            for reading in source.reading(int(windows))
        ]

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """What the text of `state` has otherwise, as lines for people."""
        states = state.get("sources", [])
        if len(states) != len(self.sources):
            return [f"sources were {len(states) or 1}, are {len(self.sources)}"]
        lines = differences({"shares": state.get("parts")}, {"shares": self._parts.tolist()})
        for source, own in zip(self.sources, states, strict=True):
            if own.get("key") != source.key:
                lines += [f"{source.reading(0)[0].name}: {line}" for line in source.differences(own)]
        return lines

    def _begun(self, position: int) -> np.ndarray:
        """(sources,) windows that each source has before the block of turns of `position`."""
        return self._before(position // _SHUFFLED * _SHUFFLED)

    def _before(self, turn: int) -> np.ndarray:
        """(sources,) windows that each source has had before a turn."""
        rounds, place = divmod(turn, len(self._turns))
        return rounds * self._parts + self._had[place]

    def _shuffled(self, sample: int) -> int:
        """The turn that the `sample`-th window is, in the shuffled order."""
        block, place = divmod(sample, _SHUFFLED)
        if block != self._block:
            self._order = np.random.default_rng([self.seed, block]).permutation(_SHUFFLED)
            self._block = block
        return block * _SHUFFLED + int(self._order[place])
