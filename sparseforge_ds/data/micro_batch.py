"""What a rank has of a global batch: some of its sequences, or an equal part of each of them.

Legend of shape suffixes: B sequences, S tokens of a sequence, or of the part of it that a rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""Label of a token that is not trained on, as in transformers."""


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch is divided."""

    micro_batch: int
    accumulation: int
    world_size: int
    rank: int
    sequence_parallel: int = 1
    """Consecutive ranks that share their sequences, each with an equal part of the tokens."""

    @property
    def at_once(self) -> int:
        """Sequences of a micro-batch, over all ranks."""
        return self.micro_batch * self.world_size // self.sequence_parallel

    @property
    def global_batch(self) -> int:
        """Sequences of an optimizer step, over all ranks."""
        return self.at_once * self.accumulation

    @property
    def reader(self) -> int:
        """Number of this rank's sequences among those of a micro-batch: that of its group."""
        return self.rank // self.sequence_parallel

    def part(self, seq_length: int) -> slice:
        """Which tokens of its sequences this rank has."""
        length, number = seq_length // self.sequence_parallel, self.rank % self.sequence_parallel
        return slice(number * length, (number + 1) * length)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of a rank that go through the model together, and what of them is trained on."""

    token_BS: Tensor
    """(B, S) int64 ids."""
    label_BS: Tensor
    """(B, S) the same ids, -100 where they are not trained on; with `shifted` the ids that the tokens predict."""
    trained: float | None = None
    """What a sum over its trained tokens is divided by, so that the mean over all micro-batches of a batch is the mean
    over the trained tokens of that batch: their number, over that of its micro-batches, parts of sequences counted one
    by one. None where all are trained on, as many in each."""
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Other inputs of the forward pass, such as an attention mask; the launcher's are position_ids, (B, S), which begin
    anew with each document where attention stays inside documents, and none elsewhere."""
    shifted: bool = False
    """Whether S is a part of the sequences, whose last token predicts the first of the next."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """All of the forward pass."""
        return {"input_ids": self.token_BS, **self.more}

    def to(self, device: torch.device | str) -> MicroBatch:
        """On another device; does not wait for it."""
        token_BS = self.token_BS.to(device, non_blocking=True)
        same = self.label_BS is self.token_BS
        label_BS = token_BS if same else self.label_BS.to(device, non_blocking=True)
        more = {key: value.to(device, non_blocking=True) for key, value in self.more.items()}
        return MicroBatch(token_BS, label_BS, self.trained, more, self.shifted)

    def of(self, part: slice, parts: int) -> MicroBatch:
        """The micro-batch of a rank that has these tokens of every sequence, of so many ranks."""
        B, S = self.token_BS.shape
        trained = B * (S - 1) if self.trained is None else self.trained
        label_BS = F.pad(self.label_BS[:, 1:], (0, 1), value=IGNORED)[:, part]
        token_BS, more = self.token_BS[:, part].contiguous(), {key: _BS[:, part] for key, _BS in self.more.items()}
        return MicroBatch(token_BS, label_BS.contiguous(), trained / parts, more, shifted=True)
