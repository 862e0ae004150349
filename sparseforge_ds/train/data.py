"""Which tokens a rank sees when: the n-th sequence of a run is the n-th window of its text.

The order belongs to the run, not to the ranks: the same position gives the same global batch at every world size, and
the whole state of the data is that position. Windows come from a text that is there whole (`PackedWindows`) or from a
stream (streaming.py). Legend of shape suffixes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How a global batch is divided."""

    micro_batch: int
    accumulation: int
    world_size: int
    rank: int

    @property
    def global_batch(self) -> int:
        """Sequences of an optimizer step, over all ranks."""
        return self.micro_batch * self.accumulation * self.world_size


@dataclass(frozen=True)
class Reading:
    """How far a source of text has been read."""

    name: str
    windows: int
    """Consumed by the run, over all ranks."""
    epochs: float
    """How often its end has been passed; of a text that is there whole, with the part of the present one."""


class Windows(Protocol):
    """An endless order of windows of a text."""

    key: str
    """Name of the text; a position in it is worth nothing in another one."""
    seq_length: int
    """S."""
    seed: int
    """Seed of the order."""

    def prepare(self, first: int, stop: int) -> None:
        """Have the windows from `first` to before `stop` at hand. Every rank calls it with the same numbers."""
        ...

    def window(self, sample: int) -> np.ndarray:
        """(S,) ids of a window that is at hand, of any type of integer."""
        ...

    def passed(self, position: int) -> None:
        """The run has consumed `position` windows. Every rank calls it with the same number."""
        ...

    def state(self) -> dict[str, Any]:
        """What is needed to find a position again besides the key, as JSON types."""
        ...

    def load(self, state: dict[str, Any], position: int) -> None:
        """Continue at `position`, with what `state` returned. Does not communicate."""
        ...

    def reading(self, position: int) -> list[Reading]:
        """How far every source has been read when the run has consumed `position` windows."""
        ...


class PackedWindows:
    """Window i is window `permutation(seed, epoch)[i]` of a text that is there whole.

    Args:
        token: (tokens,) the packed text, in memory or mapped.
        key: name of the text.
        seq_length: S.
        seed: seed of the order.
        at_least: windows that the text must have.
        name: what users call it.

    Raises:
        ValueError: the text is shorter than `at_least` windows.
    """

    def __init__(
        self, token: np.ndarray, key: str, seq_length: int, seed: int, at_least: int, name: str = "text"
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
        self._orders: dict[int, np.ndarray] = {}

    def prepare(self, first: int, stop: int) -> None:
        """Nothing: all windows are at hand."""

    def window(self, sample: int) -> np.ndarray:
        """(S,) ids."""
        epoch, place = divmod(sample, self.windows)
        if epoch not in self._orders:
            # Two, because a mixture goes back and forth across the end of an epoch.
            self._orders = {other: order for other, order in self._orders.items() if abs(other - epoch) == 1}
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
        start = int(self._orders[epoch][place]) * self.seq_length
        return self.token[start : start + self.seq_length]

    def passed(self, position: int) -> None:
        """Nothing: the text stays."""

    def state(self) -> dict[str, Any]:
        """Nothing: key and position say it all."""
        return {}

    def load(self, state: dict[str, Any], position: int) -> None:
        """Nothing."""

    def reading(self, position: int) -> list[Reading]:
        """How far the text has been read when the run has consumed `position` windows."""
        return [Reading(self.name, position, position / self.windows)]


class Batches:
    """An endless iterator over this rank's micro-batches, each (B, S) int64.

    Args:
        windows: the windows of the text, in their order.
        layout: how a global batch is divided.
    """

    def __init__(self, windows: Windows, layout: Layout) -> None:
        self.windows = windows
        self.layout = layout
        self.position = 0
        """Sequences that the run has consumed, over all ranks."""
        self._epochs: dict[str, int] | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Tensor:
        batch_BS = self.at(self.position)
        self.position += self.layout.micro_batch * self.layout.world_size
        self.windows.passed(self.position)
        return batch_BS

    def at(self, position: int) -> Tensor:
        """This rank's (B, S) micro-batch when the run has consumed `position` sequences; consumes nothing.

        Every rank calls it with the same position: all wait together for a text that is still being tokenised.

        Raises:
            AgreedError: the text cannot be read any further.
        """
        micro_batch = self.layout.micro_batch
        self.prepare(position)
        first = position + self.layout.rank * micro_batch
        window_BS = np.stack([self.windows.window(first + j) for j in range(micro_batch)])
        return torch.from_numpy(window_BS.astype(np.int64))

    def prepare(self, position: int | None = None) -> None:
        """Have the micro-batches of all ranks at `position` (default: the present one) at hand; as `at` in all else."""
        first = self.position if position is None else position
        self.windows.prepare(first, first + self.layout.micro_batch * self.layout.world_size)

    def prepare_step(self) -> None:
        """Have the whole next global batch at hand, so that text cannot end in the middle of a step; as `prepare`."""
        self.windows.prepare(self.position, self.position + self.layout.global_batch)

    def reading(self) -> list[Reading]:
        """How far every source of the text has been read."""
        return self.windows.reading(self.position)

    def scalars(self) -> dict[str, float]:
        """How far every source of the text has been read, tagged for the log."""
        readings = self.reading()
        alone = len(readings) == 1
        result = {}
        for number, reading in enumerate(readings):
            tag = "data" if alone else f"data/{number}_" + re.sub(r"[^\w.-]+", "_", reading.name).strip("_")
            result[f"{tag}/tokens"] = float(reading.windows * self.windows.seq_length)
            result[f"{tag}/epochs"] = reading.epochs
        return result

    def news(self) -> list[str]:
        """Lines about the sources that have begun again since the last call, for the 1st, 2nd, 4th, 8th, ... time."""
        epochs = {reading.name: int(reading.epochs) for reading in self.reading()}
        before, self._epochs = self._epochs, epochs
        return [
            f"--dataset {name}: read {now} time{'s' * (now > 1)}, begins again"
            for name, now in epochs.items()
            if before is not None and now.bit_length() > before[name].bit_length()
        ]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        windows = self.windows
        place = {"position": self.position, "key": windows.key, "seq_length": windows.seq_length, "seed": windows.seed}
        return {**place, **windows.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Does not communicate.

        Raises:
            ValueError: the state belongs to another text, another sequence length or another order.
        """
        for name, here, cure in (
            (
                "key",
                self.windows.key,
                "--dataset (its weights too), --text_field and --document_frame, with unchanged files",
            ),
            ("seq_length", self.windows.seq_length, "--seq_length"),
            ("seed", self.windows.seed, "--seed"),
        ):
            if state[name] != here:
                raise ValueError(
                    f"the checkpoint was trained on other data ({name} {state[name]}, here {here}); "
                    f"resume with the same {cure}"
                )
        self.position = int(state["position"])
        self.windows.load(state, self.position)
