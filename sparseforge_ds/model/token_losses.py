"""Cross-entropy and KL of every token, and their gradient, from blocks of logits.

Each of the two kernels has a compiled form, which stores nothing of a block's size, and one that runs step by step and
reuses its memory.

Shape suffixes: T tokens, V entries of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.mask.kernels.fusing import fused

IGNORED = -100
"""Label of a position that is not trained on, as in transformers."""


class TokenLosses:
    """Both terms of the loss of every token, collected block by block, and the gradient that follows from them.

    The gradient of a block needs the log-normalizers of its rows, so these are kept. Values of a token whose label is
    ignored are meaningless, and are never used. Sums are in fp32, or in fp64 if the logits are.
    """

    def __init__(
        self, next_T: Tensor, config: DistillationConfig, dtype: torch.dtype, trained: float | None = None
    ) -> None:
        """Make room for the tokens.

        Args:
            next_T: label that each token predicts.
            config: weights and temperature.
            dtype: of the logits.
            trained: divisor of the sums, as in `distillation_loss`.
        """
        self.config = config
        self.exact = torch.promote_types(dtype, torch.float32)
        """Dtype of the sums."""
        self.ignored_T1 = (next_T == IGNORED)[:, None]
        self.trained = self.ignored_T1.numel() - self.ignored_T1.sum() if trained is None else trained
        self.target_T1 = next_T[:, None].masked_fill(self.ignored_T1, 0)
        columns = torch.zeros(5, len(next_T), 1, dtype=self.exact, device=next_T.device)
        self.kl_T1 = columns[0]
        self.cross_entropy_T1 = columns[1]
        # Log-normalizers: of the student at temperature 1, and of both models at the set temperature.
        self.student_T1 = columns[2]
        self.tempered_T1 = columns[3]
        self.teacher_T1 = columns[4]

    def add(self, rows: slice, student_TV: Tensor, teacher_TV: Tensor | None) -> None:
        """Compute the terms of a block of rows from their logits."""
        temperature = self.config.temperature
        parts = _token_losses(student_TV, teacher_TV, self.target_T1[rows], temperature, temperature != 1.0)
        columns = (self.student_T1, self.cross_entropy_T1, self.tempered_T1, self.teacher_T1, self.kl_T1)
        for column_T1, part_T1 in zip(columns, parts, strict=False):  # without a teacher there are three parts
            column_T1[rows] = part_T1

    def means(self) -> Tensor:
        """Return total, cross-entropy and KL over the tokens that are trained on, (3,) (eq. 12)."""
        cross_entropy, kl = (
            token_T1.masked_fill(self.ignored_T1, 0.0).sum() / self.trained
            for token_T1 in (self.cross_entropy_T1, self.kl_T1)
        )
        total = self.config.task_weight * cross_entropy + self.config.weight * kl
        return torch.stack([total, cross_entropy, kl])

    def gradient(
        self,
        student_TV: Tensor,
        teacher_TV: Tensor | None,
        grad_total: Tensor,
        rows: slice = slice(None),
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the gradient of a block of the student's logits, after all rows were added.

        Args:
            student_TV: the block's logits.
            teacher_TV: likewise, or None.
            grad_total: () gradient of the total loss.
            rows: tokens of the block.
            columns: entries of the vocabulary in the block; None for all.
            dtype: of the result; by default `exact`.
        """
        temperature = self.config.temperature
        return _logit_gradient(
            student_TV,
            teacher_TV,
            torch.cat([self.student_T1[rows], self.tempered_T1[rows], self.teacher_T1[rows]], dim=1),
            self.target_T1[rows] - (0 if columns is None else columns.start),
            self.ignored_T1[rows],
            (grad_total / self.trained).to(self.exact),
            temperature,
            self.config.weight * temperature,
            self.config.task_weight,
            temperature != 1.0,
            self.exact if dtype is None else dtype,
        )


@fused(kernels=8, reads=2)
def _token_losses(
    student_TV: Tensor, teacher_TV: Tensor | None, target_T1: Tensor, temperature: float, tempered: bool
) -> list[Tensor]:
    """Compute both terms of the loss, and the log-normalizers of every row.

    Args:
        student_TV: whole rows of logits, in any floating dtype.
        teacher_TV: likewise, or None.
        target_T1: labels, 0 for ignored ones.
        temperature: of the KL.
        tempered: True if the temperature is not 1.

    Returns:
        Columns (T, 1) in fp32, or in fp64 if the logits are: log-normalizers of the student at temperature 1,
        cross-entropy, log-normalizers of the student at the set temperature; with a teacher also the teacher's, and KL.
    """
    if torch.compiler.is_compiling():
        return _token_losses_compiled(student_TV, teacher_TV, target_T1, temperature, tempered)
    return _token_losses_in_place(student_TV, teacher_TV, target_T1, temperature, tempered)


def _token_losses_compiled(
    student_TV: Tensor, teacher_TV: Tensor | None, target_T1: Tensor, temperature: float, tempered: bool
) -> list[Tensor]:
    """Compute `_token_losses` such that a compiler stores nothing of a block's size."""
    # Cross-entropy: log-normalizer less the label's logit.
    high_T1, below_TV = _below(student_TV)
    log_sum_T1 = below_TV.exp().sum(-1, keepdim=True).log()
    parts = [high_T1 + log_sum_T1, log_sum_T1 - below_TV.gather(1, target_T1)]
    # The student at the set temperature.
    if tempered:
        below_TV = below_TV / temperature
        high_T1 = high_T1 / temperature
        log_sum_T1 = below_TV.exp().sum(-1, keepdim=True).log()
    parts.append(high_T1 + log_sum_T1)
    if teacher_TV is None:
        return parts
    # The teacher, and KL: the sum of p (log p - log q), with the two constants of a row taken out of the sum.
    teacher_high_T1, teacher_below_TV = _below(teacher_TV)
    if tempered:
        teacher_below_TV = teacher_below_TV / temperature
        teacher_high_T1 = teacher_high_T1 / temperature
    share_TV = teacher_below_TV.exp()
    sum_T1 = share_TV.sum(-1, keepdim=True)
    kl_T1 = (share_TV * (teacher_below_TV - below_TV)).sum(-1, keepdim=True) / sum_T1 + log_sum_T1 - sum_T1.log()
    return [*parts, teacher_high_T1 + sum_T1.log(), kl_T1 * temperature * temperature]


def _token_losses_in_place(
    student_TV: Tensor, teacher_TV: Tensor | None, target_T1: Tensor, temperature: float, tempered: bool
) -> list[Tensor]:
    """Compute `_token_losses` step by step, with three blocks of memory."""
    # Cross-entropy: log-normalizer less the label's logit.
    high_T1, below_TV = _below(student_TV)
    scratch_TV = below_TV.exp()
    log_sum_T1 = scratch_TV.sum(-1, keepdim=True).log_()
    parts = [high_T1 + log_sum_T1, log_sum_T1 - below_TV.gather(1, target_T1)]
    # The student at the set temperature.
    if tempered:
        torch.exp(below_TV.div_(temperature), out=scratch_TV)
        log_sum_T1 = scratch_TV.sum(-1, keepdim=True).log_()
    parts.append(high_T1 / temperature + log_sum_T1)
    if teacher_TV is None:
        return parts
    # The teacher, and KL: the sum of p (log p - log q), with the two constants of a row taken out of the sum.
    teacher_high_T1, teacher_below_TV = _below(teacher_TV)
    if tempered:
        teacher_below_TV.div_(temperature)
    torch.exp(teacher_below_TV, out=scratch_TV)
    sum_T1 = scratch_TV.sum(-1, keepdim=True)
    teacher_log_sum_T1 = sum_T1.log()
    parts.append(teacher_high_T1 / temperature + teacher_log_sum_T1)
    kl_T1 = scratch_TV.mul_(teacher_below_TV.sub_(below_TV)).sum(-1, keepdim=True).div_(sum_T1)
    return [*parts, kl_T1.add_(log_sum_T1 - teacher_log_sum_T1).mul_(temperature**2)]


def _below(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, (T, 1), and all logits less it: one kernel from 16 bits to 32."""
    high_T1 = logits_TV.amax(-1, keepdim=True).to(torch.promote_types(logits_TV.dtype, torch.float32))
    return high_T1, torch.sub(logits_TV, high_T1)


@fused()
def _logit_gradient(  # an operator of torch takes no object
    student_TV: Tensor,
    teacher_TV: Tensor | None,
    normalizer_T3: Tensor,
    target_T1: Tensor,
    ignored_T1: Tensor,
    scale: Tensor,
    temperature: float,
    kl_weight: float,
    task_weight: float,
    tempered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Compute d total / d student for a block of rows and columns of logits.

    d KL / d student = (softmax(student / T) - softmax(teacher / T)) / T, and T^2 of the loss makes that a factor T.

    Args:
        student_TV: logits, in any floating dtype.
        teacher_TV: likewise, or None.
        normalizer_T3: log-normalizers of the student at temperature 1, and of both models at the set temperature.
        target_T1: columns of the labels, which may lie outside of the block.
        ignored_T1: rows without a gradient.
        scale: () gradient of the total loss, over the number of trained tokens.
        temperature: of the KL.
        kl_weight: of the KL, times the temperature.
        task_weight: of the cross-entropy.
        tempered: True if the temperature is not 1.
        dtype: of the result.
    """
    plain_T1, tempered_T1, teacher_T1 = normalizer_T3.split(1, dim=1)
    if torch.compiler.is_compiling():
        # The student's share of both terms.
        exact_TV = student_TV.to(normalizer_T3.dtype)
        gradient_TV = (exact_TV - plain_T1).exp() * task_weight
        if tempered:
            gradient_TV = gradient_TV + (exact_TV / temperature - tempered_T1).exp() * kl_weight
        else:
            gradient_TV = gradient_TV + (exact_TV - tempered_T1).exp() * kl_weight
        # The teacher's, and the label's.
        if teacher_TV is not None:
            teacher_exact_TV = teacher_TV.to(normalizer_T3.dtype)
            teacher_exact_TV = teacher_exact_TV / temperature if tempered else teacher_exact_TV
            gradient_TV = gradient_TV - (teacher_exact_TV - teacher_T1).exp() * kl_weight
        column_V = torch.arange(student_TV.shape[1], device=student_TV.device)
        gradient_TV = torch.where(column_V == target_T1, gradient_TV - task_weight, gradient_TV)
        return torch.where(ignored_T1, 0.0, gradient_TV * scale).to(dtype)
    # The student's share of both terms, which is one at temperature 1.
    gradient_TV = _softmax(student_TV, tempered_T1, temperature)
    if not tempered:
        gradient_TV.mul_(kl_weight + task_weight)
    else:
        plain_TV = _softmax(student_TV, plain_T1, 1.0)
        gradient_TV.mul_(kl_weight).add_(plain_TV, alpha=task_weight)
        del plain_TV
    # The teacher's, and the label's.
    if teacher_TV is not None:
        gradient_TV.sub_(_softmax(teacher_TV, teacher_T1, temperature), alpha=kl_weight)
    inside_T1 = (target_T1 >= 0) & (target_T1 < student_TV.shape[1])
    gradient_TV.scatter_add_(1, target_T1.where(inside_T1, 0), -task_weight * inside_T1.to(gradient_TV.dtype))
    return gradient_TV.mul_(scale).masked_fill_(ignored_T1, 0.0).to(dtype)


def _softmax(logits_TV: Tensor, normalizer_T1: Tensor, temperature: float) -> Tensor:
    below_TV = torch.sub(logits_TV, normalizer_T1 * temperature)
    return (below_TV if temperature == 1.0 else below_TV.div_(temperature)).exp_()
