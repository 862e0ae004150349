"""Which tokens a rank sees when: the n-th sequence of a run is the n-th window of its text.

The order belongs to the run, not to the ranks: the same position gives the same global batch at every world size, and
the whole state of the data is that position. Windows come from a text that is there whole (`PackedWindows`) or from a
stream (streaming.py). Legend of shape suffixes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_SHOWN = 8
"""Differences that are named in one line."""


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
    skipped: int = 0
    """Documents without text that were passed while a stream was read."""


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

    def state(self) -> dict[str, Any]:
        """The key, the facts that it stands for, and what is needed to find a position again, as JSON types.

        A mixture has `parts` and the states of its `sources` in place of facts.
        """
        ...

    def load(self, state: Mapping[str, Any], position: int) -> None:
        """Continue at `position`, with what `state` returned, here or of another text. Does not communicate."""
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
        facts: what the key stands for.

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

    def state(self) -> dict[str, Any]:
        """What the text is; with the position that is all."""
        return {"key": self.key, "facts": self.facts}

    def load(self, state: Mapping[str, Any], position: int) -> None:
        """Nothing."""

    def reading(self, position: int) -> list[Reading]:
        """How far the text has been read when the run has consumed `position` windows."""
        return [Reading(self.name, position, position / self.windows)]


class Batches:
    """An endless iterator over this rank's micro-batches, each (B, S) int64.

    Args:
        windows: the windows of the text, in their order.
        layout: how a global batch is divided.
        takes_other_data: whether a state of another text is accepted, which is then said.
    """

    def __init__(self, windows: Windows, layout: Layout, takes_other_data: bool = False) -> None:
        self.windows = windows
        self.layout = layout
        self.takes_other_data = takes_other_data
        self.position = 0
        """Sequences that the run has consumed, over all ranks."""
        self._before: dict[str, Reading] | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Tensor:
        batch_BS = self.at(self.position)
        self.position += self.layout.micro_batch * self.layout.world_size
        return batch_BS

    def step(self) -> list[Tensor]:
        """This rank's micro-batches of the next global batch, as `next` will give them; consumes nothing, as `at`."""
        stride = self.layout.micro_batch * self.layout.world_size
        return [self.at(self.position + stride * number) for number in range(self.layout.accumulation)]

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
        """Lines about the sources that have begun again since the last call, for the 1st, 2nd, 4th, 8th, ... time.

        And of streams, when the documents without text that were skipped have become twice as many.
        """
        now = {reading.name: reading for reading in self.reading()}
        begun = {name: dataclasses.replace(reading, skipped=0) for name, reading in now.items()}
        before, self._before = self._before or begun, now
        lines = []
        for name, reading in now.items():
            times, skipped = int(reading.epochs), reading.skipped
            if times.bit_length() > int(before[name].epochs).bit_length():
                lines.append(f"--dataset {name}: read {times} time{'s' * (times > 1)}, begins again")
            if skipped.bit_length() > before[name].skipped.bit_length():
                lines.append(f"--dataset {name}: {skipped:,} documents without text were skipped so far")
        return lines

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        windows = self.windows
        place = {"position": self.position, "seq_length": windows.seq_length, "seed": windows.seed}
        return {**place, **windows.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Does not communicate.

        Raises:
            ValueError: the state belongs to another text, which is not accepted, another sequence length or order.
        """
        for name, here in (("seq_length", self.windows.seq_length), ("seed", self.windows.seed)):
            if state[name] != here:
                raise ValueError(
                    f"the checkpoint was trained on other data ({name} {state[name]}, here {here}); "
                    f"resume with the same --{name}"
                )
        if state["key"] != self.windows.key:
            self._take_other_data(state)
        self.position = int(state["position"])
        self.windows.load(state, self.position)

    def _take_other_data(self, state: Mapping[str, Any]) -> None:
        names = [reading.name for reading in self.windows.reading(0)]
        unlike = differences(state, self.windows.state(), names) or [f"key {state['key']}, here {self.windows.key}"]
        what = "; ".join([*unlike[:_SHOWN], *([f"and {len(unlike) - _SHOWN} more"] if len(unlike) > _SHOWN else [])])
        if not self.takes_other_data:
            raise ValueError(
                f"the checkpoint was trained on other data ({what}); resume with the same --dataset and flags, or go "
                "on with this text by --resume_other_data"
            )
        if self.layout.rank == 0:
            print(f"--resume_other_data: goes on with another text than the checkpoint's: {what}", flush=True)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """What two texts have otherwise, as lines for people.

    Args:
        before: state of the windows of the one.
        now: of the other.
        names: of its sources.
    """
    sources = [state.get("sources", [state]) for state in (before, now)]
    if len(sources[0]) != len(sources[1]):
        return [f"sources were {len(sources[0])}, are {len(sources[1])}"]
    lines = []
    if before.get("parts") != now.get("parts"):
        lines.append(f"shares were {before.get('parts')}, are {now.get('parts')}")
    for name_of_source, old, new in zip(names, *sources, strict=True):
        whose = f"{name_of_source}: " if len(names) > 1 else ""
        facts = [{**state["facts"], **state["facts"].get("files", {}), "files": None} for state in (old, new)]
        for name in {**facts[0], **facts[1]}:
            was, is_now = (of_text.get(name, "not there") for of_text in facts)
            file = "file " * any(name in state["facts"].get("files", {}) for state in (old, new))
            lines += [f"{whose}{file}{name} was {was}, is {is_now}"] if was != is_now else []
    return lines
