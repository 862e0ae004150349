"""Which tokens a rank sees when: sample i of the run is window `permutation(seed, epoch)[i]` of the packed text.

The order belongs to the run, not to the ranks: the same position gives the same global batch at every world size, and
the whole state of the data is that position. Legend of shape suffixes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class Batches:
    """An endless iterator over this rank's micro-batches, each (B, S) int64.

    Args:
        token: (tokens,) the packed text, in memory or mapped.
        key: name of the text; a saved position is worth nothing for another one.
        seq_length: S.
        layout: how a global batch is divided.
        seed: seed of the order.

    Raises:
        ValueError: the text is shorter than one global batch.
    """

    def __init__(self, token: np.ndarray, key: str, seq_length: int, layout: Layout, seed: int) -> None:
        self.windows = len(token) // seq_length
        if self.windows < layout.global_batch:
            raise ValueError(
                f"the text has {len(token):,} tokens, {self.windows} windows of --seq_length {seq_length}: too little "
                f"for one batch of {layout.global_batch}; give more text with --dataset, or shorter sequences"
            )
        self.token = token
        self.key = key
        self.seq_length = seq_length
        self.layout = layout
        self.seed = seed
        self.position = 0
        """Sequences that the run has consumed, over all ranks."""
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Tensor:
        batch_BS = self.at(self.position)
        self.position += self.layout.micro_batch * self.layout.world_size
        return batch_BS

    def at(self, position: int) -> Tensor:
        """This rank's (B, S) micro-batch when the run has consumed `position` sequences; consumes nothing."""
        first = position + self.layout.rank * self.layout.micro_batch
        return torch.stack([self._window(first + j) for j in range(self.layout.micro_batch)])

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {"position": self.position, "key": self.key, "seq_length": self.seq_length, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: the state belongs to another text, another sequence length or another order.
        """
        for name, here, cure in (
            ("key", self.key, "--dataset and --text_field, with unchanged files"),
            ("seq_length", self.seq_length, "--seq_length"),
            ("seed", self.seed, "--seed"),
        ):
            if state[name] != here:
                raise ValueError(
                    f"the checkpoint was trained on other data ({name} {state[name]}, here {here}); "
                    f"resume with the same {cure}"
                )
        self.position = int(state["position"])

    def _window(self, sample: int) -> Tensor:
        epoch, place = divmod(sample, self.windows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
            self._epoch = epoch
        start = int(self._order[place]) * self.seq_length
        return torch.from_numpy(self.token[start : start + self.seq_length].astype(np.int64))
