"""Teacher that is known by its K largest logits of every token, and by the share of all others together (eq. 12c).

S are the teacher's K largest entries, p and q the probabilities of teacher and student at temperature T, and p_rest and
q_rest those of all entries outside of S. The divergence is that of two distributions over K + 1 classes:

    KL_K = T^2 (sum over S of p log(p / q) + p_rest log(p_rest / q_rest))

It is at most the full KL, and equal to it where student and teacher divide the rest in the same way. Its gradient is
the full one against a teacher that divides its rest as the student does: p_rest q / q_rest. So this teacher's logits
follow from the student's, and `model.token_losses` computes loss and gradient as ever.

Shape suffixes: B sequences, S positions, T tokens, V entries of the vocabulary, K largest ones, L = K + 1 classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class TopLogits(NamedTuple):
    """A teacher's largest logits for a batch of tokens."""

    entry_BSK: Tensor
    """Their entries of the vocabulary, int64."""
    share_BSL: Tensor
    """Log-probabilities of these entries at the temperature, and behind them the logarithm of the others' sum."""

    def to(self, device: torch.device | str) -> TopLogits:
        """Copy to another device, without waiting for the copy."""
        return TopLogits(*(tensor.to(device, non_blocking=True) for tensor in self))

    def take_tokens(self, part: slice) -> TopLogits:
        """Return some positions of every sequence."""
        return TopLogits(*(tensor[:, part].contiguous() for tensor in self))


@torch.no_grad()
def largest_logits(logits_TV: Tensor, largest: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return entries (T, K) and log-probabilities (T, K + 1) in fp32, as `TopLogits` has them.

    Args:
        logits_TV: logits of a teacher.
        largest: K, less than V.
        temperature: divisor of the logits.
    """
    scaled_TV = logits_TV.float() / temperature
    top_TK, entry_TK = scaled_TV.topk(largest, -1)
    normalizer_T1 = scaled_TV.logsumexp(-1, keepdim=True)
    rest_T1 = scaled_TV.scatter_(1, entry_TK, -torch.inf).logsumexp(-1, keepdim=True)
    return entry_TK, torch.cat([top_TK, rest_T1], 1) - normalizer_T1


class TopTeacher:
    """Source of blocks of logits that make equation 12 that of K + 1 classes.

    Args:
        top: the teacher's largest logits.
        temperature: of the loss; that of `top`.
        dtype: of the results.
    """

    def __init__(self, top: TopLogits, temperature: float, dtype: torch.dtype) -> None:
        self.temperature = temperature
        self.dtype = dtype
        self._entry_TK = top.entry_BSK.flatten(0, 1)
        # Rounding to 16 bits leaves the sum a little beside 1.
        self._share_TL = torch.log_softmax(top.share_BSL.flatten(0, 1).to(dtype), -1)
        tokens = len(self._entry_TK)
        self._shift_T1 = torch.zeros(tokens, 1, dtype=dtype, device=self._entry_TK.device)
        self._normalizer_T1 = torch.zeros_like(self._shift_T1)

    def rows(self, student_TV: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return whole rows of the teacher's logits, from those of the student."""
        entry_TK = self._entry_TK[rows]
        scaled_TV = student_TV.to(self.dtype) / self.temperature
        self._normalizer_T1[rows] = scaled_TV.logsumexp(-1, keepdim=True)
        rest_T1 = scaled_TV.scatter_(1, entry_TK, -torch.inf).logsumexp(-1, keepdim=True)
        self._shift_T1[rows] = self._share_TL[rows, -1:] - (rest_T1 - self._normalizer_T1[rows])
        return self._shifted(student_TV, rows).scatter_(1, entry_TK, self._largest(rows))

    def columns(self, student_TV: Tensor, columns: slice) -> Tensor:
        """Return some columns of all rows, each of which `rows` has given before."""
        place_TK = self._entry_TK - columns.start
        width = student_TV.shape[1]
        # Entries outside of the block go to a column that is cut off.
        place_TK = place_TK.where((place_TK >= 0) & (place_TK < width), width)
        padded_TV = F.pad(self._shifted(student_TV, slice(None)), (0, 1))
        return padded_TV.scatter_(1, place_TK, self._largest(slice(None)))[:, :width].contiguous()

    def _shifted(self, student_TV: Tensor, rows: slice) -> Tensor:
        """Return the student's logits, moved such that the rest gets the teacher's share."""
        return student_TV.to(self.dtype) + self.temperature * self._shift_T1[rows]

    def _largest(self, rows: slice) -> Tensor:
        """Return the teacher's largest logits, (T, K), with the student's log-normalizer."""
        return self.temperature * (self._share_TL[rows, :-1] + self._normalizer_T1[rows])
