"""Division of a global batch over ranks: whole sequences, or an equal part of each sequence.

Legend of shape suffixes: B sequences, S tokens of a sequence, or of one rank's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.model.token_losses import IGNORED as IGNORED
from sparseforge_ds.model.top_logits import TopLogits


@dataclass(frozen=True)
class BatchLayout:
    """Place of one rank in a global batch."""

    micro_batch: int
    """Sequences of one rank, or of one group of ranks that share sequences, in a micro-batch."""
    accumulation: int
    """Micro-batches of an optimizer step."""
    world_size: int
    rank: int
    sequence_parallel: int = 1
    """Consecutive ranks that share their sequences, each with an equal part of the tokens."""

    @property
    def sequences_at_once(self) -> int:
        """Return the sequences of a micro-batch over all ranks."""
        return self.micro_batch * self.world_size // self.sequence_parallel

    @property
    def global_batch(self) -> int:
        """Return the sequences of an optimizer step over all ranks."""
        return self.sequences_at_once * self.accumulation

    @property
    def data_parallel_rank(self) -> int:
        """Return the number of the group of ranks that share their sequences, of which this rank is one."""
        return self.rank // self.sequence_parallel

    def token_slice(self, seq_length: int) -> slice:
        """Return the range of a sequence's tokens that this rank computes."""
        length = seq_length // self.sequence_parallel
        start = self.rank % self.sequence_parallel * length
        return slice(start, start + length)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that one rank sends through the model together, and their labels."""

    token_BS: Tensor
    """(B, S) int64 ids."""
    label_BS: Tensor
    """(B, S) int64: the same ids, or -100 where a token is not trained on. If `shifted`, entry i is the id that token i
    predicts."""
    trained: float | None = None
    """Divisor of the summed loss of the trained tokens, or None where every token is trained on.

    It is the number of trained tokens of the whole global batch over its number of micro-batches. A part of a sequence
    counts as a micro-batch. With it, the mean over micro-batches is the mean over the batch's trained tokens."""
    extra_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Other inputs of the forward pass, like an attention mask. The launcher has only `position_ids` (B, S), which
    restart at 0 with each document, where attention stays inside documents."""
    shifted: bool = False
    """True if S is a part of the sequences. The last token of a part predicts the first token of the next part."""
    top: TopLogits | None = None
    """A teacher's largest logits of the tokens, with `--teacher_logits`."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return all keyword arguments of the forward pass."""
        return {"input_ids": self.token_BS, **self.extra_inputs}

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy to another device, without waiting for the copy."""
        token_BS = self.token_BS.to(device, non_blocking=True)
        same = self.label_BS is self.token_BS
        label_BS = token_BS if same else self.label_BS.to(device, non_blocking=True)
        extra_inputs = {key: value.to(device, non_blocking=True) for key, value in self.extra_inputs.items()}
        top = None if self.top is None else self.top.to(device)
        return MicroBatch(token_BS, label_BS, self.trained, extra_inputs, self.shifted, top)

    def take_tokens(self, part: slice, parts: int) -> MicroBatch:
        """Return the share of one rank in sequences that several ranks compute together.

        Args:
            part: range of the tokens that the rank has.
            parts: number of ranks that share the sequences.
        """
        B, S = self.token_BS.shape
        trained = B * (S - 1) if self.trained is None else self.trained
        # Labels are shifted before they are cut, since a part's last token predicts a token of the next part.
        label_BS = F.pad(self.label_BS[:, 1:], (0, 1), value=IGNORED)[:, part]
        token_BS = self.token_BS[:, part].contiguous()
        extra_inputs = {key: value_BS[:, part] for key, value_BS in self.extra_inputs.items()}
        top = None if self.top is None else self.top.take_tokens(part)
        return MicroBatch(token_BS, label_BS.contiguous(), trained / parts, extra_inputs, shifted=True, top=top)
