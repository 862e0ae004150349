"""Knowledge distillation from the frozen dense model (design eq. 12), as a loss of logits.

    L = l_task * CE(student, labels) + l_KL * T^2 * KL(softmax(teacher / T) || softmax(student / T))

Vocabularies are large: the fp32 log-probabilities of one sequence can outweigh the model. Both terms and their gradient
are therefore formed a block of logits at a time; `model.head` does the same without ever having all logits. Shape
suffixes: B sequences, S positions, T tokens (of a block, or all B * S), V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.mask.fusing import fused, is_compiled

IGNORED = -100
"""Label of a position that is not trained on, as in transformers."""
BLOCK = 2**25
"""Most logits of a model that are worked on at a time, so that a large vocabulary makes blocks of fewer tokens."""


class DistillationLoss(NamedTuple):
    """Scalars in fp32, each the mean over the tokens that are not ignored."""

    total: Tensor
    """task_weight * cross_entropy + weight * kl + hidden.weight * hidden; the only one with a gradient."""
    cross_entropy: Tensor
    """Next-token cross-entropy, for the log."""
    kl: Tensor
    """KL from the teacher, times the squared temperature, for the log."""
    hidden: Tensor
    """Mean relative squared distance of the hidden states (`model.hidden`), for the log; 0 where none are compared."""


def distillation_loss(
    student_logits_BSV: Tensor,
    teacher_logits_BSV: Tensor,
    labels_BS: Tensor,
    config: DistillationConfig,
    trained: float | None = None,
    shifted: bool = False,
) -> DistillationLoss:
    """The training loss, with the shift by one of transformers' causal models inside: logits at s predict label s + 1.

    The gradient is formed in the backward pass, block by block in fp32, times whatever scale comes from above, and then
    stored in the dtype of the logits: fp16 loss scaling protects it. A non-finite logit gives a non-finite loss; a
    batch in which every label is ignored gives NaN, like `torch.nn.functional.cross_entropy`, or 0 with `trained`.

    Args:
        student_logits_BSV: (B, S, V) in any floating dtype.
        teacher_logits_BSV: (B, S, V), no gradient flows to it.
        labels_BS: (B, S) unshifted token ids, the same ids at the same places as the inputs; -100 is ignored.
        config: weights, temperature and the tokens of a block.
        trained: what sums over the labels that are not ignored are divided by; None for their number here. With their
            number in a whole step, over that of its micro-batches on all ranks, the mean over the micro-batches is that
            of the step.
        shifted: whether the labels are what each position predicts, as transformers' `shift_labels`: those of a part of
            a sequence, whose last token predicts one that is not here.

    Raises:
        ValueError: shapes that do not belong together, above all two different vocabularies; a config that distils
            hidden states, which logits do not tell.
    """
    B, S, V = student_logits_BSV.shape
    if config.hidden is not None:
        raise ValueError(
            "distillation.hidden is set, but distillation_loss sees logits alone; use loss_in_head with the targets of "
            "a Teacher, which compares hidden states too, or set it to null"
        )
    same_vocabulary(V, teacher_logits_BSV.shape[-1])
    if teacher_logits_BSV.shape != (B, S, V) or labels_BS.shape != (B, S):
        raise ValueError(
            f"student logits {(B, S, V)}, teacher logits {tuple(teacher_logits_BSV.shape)} and labels "
            f"{tuple(labels_BS.shape)} do not belong together; give (B, S, V), (B, S, V) and (B, S) of one batch"
        )
    losses = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        student_logits_BSV.reshape(-1, V),
        teacher_logits_BSV.detach().reshape(-1, V),
        next_labels(labels_BS, shifted),
        config,
        trained,
    )
    return parts_of(losses)


def task_loss(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    chunk_tokens: int = 1024,
    trained: float | None = None,
    shifted: bool = False,
) -> Tensor:
    """() fp32 next-token cross-entropy without a teacher, of logits (B, S, V) and labels (B, S) as in
    `distillation_loss`."""
    losses: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        logits_BSV.flatten(0, 1), None, next_labels(labels_BS, shifted), task_only(chunk_tokens), trained
    )
    return losses[0]


def task_only(chunk_tokens: int = 1024) -> DistillationConfig:
    """Of a loss without a teacher."""
    return DistillationConfig(weight=0.0, task_weight=1.0, chunk_tokens=chunk_tokens)


def next_labels(labels_BS: Tensor, shifted: bool = False) -> Tensor:
    """(B * S,) what each position predicts. Labels are shifted, not logits, so that blocks of logits are views.
    Labels are at the places of the inputs or, if `shifted`, at those that predict them."""
    return labels_BS.reshape(-1) if shifted else F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED).reshape(-1)


def parts_of(losses: Tensor) -> DistillationLoss:
    """(3,) total, cross-entropy and KL, of which the first alone keeps its graph."""
    total, cross_entropy, kl = losses
    return DistillationLoss(total, cross_entropy.detach(), kl.detach(), torch.zeros_like(kl.detach()))


def same_vocabulary(student: int, teacher: int) -> None:
    """Raise a ValueError where two vocabularies cannot be compared entry by entry."""
    if student != teacher:
        raise ValueError(
            f"the teacher's vocabulary has {teacher} entries and the student's {student}; distillation compares them "
            "entry by entry, so use a teacher with the same tokenizer and the same padding of its head, or set "
            "distillation to null. After resize_token_embeddings the teacher is the resized dense model: save it "
            "before training (save_pretrained), and give that folder"
        )


def blocks(total: int, size: int) -> Iterator[slice]:
    """`range(total)` in slices of at most `size`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def block_tokens(config: DistillationConfig, vocabulary: int) -> int:
    """Tokens of a block of whole rows of logits."""
    return max(1, min(config.chunk_tokens, BLOCK // vocabulary))


class _ChunkedLoss(torch.autograd.Function):
    """Equation 12 on flat tokens; never more than one fp32 block of [tokens, vocabulary]."""

    @staticmethod
    def forward(
        ctx: Any,
        student_TV: Tensor,
        teacher_TV: Tensor | None,
        next_T: Tensor,
        config: DistillationConfig,
        trained: float | None,
    ) -> Tensor:
        tokens = TokenLosses(next_T, config, student_TV.dtype, trained)
        for rows in blocks(len(next_T), block_tokens(config, student_TV.shape[1])):
            tokens.add(rows, student_TV[rows], None if teacher_TV is None else teacher_TV[rows])
        ctx.save_for_backward(student_TV, teacher_TV)
        ctx.tokens = tokens
        return tokens.means()

    @staticmethod
    def backward(ctx: Any, *of_losses: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        student_TV, teacher_TV = ctx.saved_tensors
        tokens: TokenLosses = ctx.tokens
        gradient_TV = torch.empty_like(student_TV)
        for rows in blocks(len(student_TV), block_tokens(tokens.config, student_TV.shape[1])):
            teacher = None if teacher_TV is None else teacher_TV[rows]
            # Step by step the cast is a part of the copy.
            dtype = student_TV.dtype if is_compiled(student_TV.device) else None
            gradient_TV[rows] = tokens.gradient(student_TV[rows], teacher, of_losses[0][0], rows=rows, dtype=dtype)
        return gradient_TV, None, None, None, None


def first_derivative_only() -> None:
    """Raise in a backward pass with create_graph: what is formed in place would be missing from that graph."""
    if torch.is_grad_enabled():
        raise ValueError(
            "distillation_loss has no second derivative; call backward without create_graph=True, or use "
            "torch.nn.functional.cross_entropy and kl_div where a double backward is wanted"
        )


class TokenLosses:
    """Both terms of every token, and what a block of the gradient needs of its rows: their log-normalizers.

    Numbers of a token whose label is ignored are meaningless, and go nowhere. Sums are in fp32, or in fp64 where the
    logits are, and are divided by `trained` as in `distillation_loss`.
    """

    def __init__(
        self, next_T: Tensor, config: DistillationConfig, dtype: torch.dtype, trained: float | None = None
    ) -> None:
        self.config = config
        self.exact = torch.promote_types(dtype, torch.float32)
        self.ignored_T1 = (next_T == IGNORED)[:, None]
        self.trained = self.ignored_T1.numel() - self.ignored_T1.sum() if trained is None else trained
        self.target_T1 = next_T[:, None].masked_fill(self.ignored_T1, 0)
        # Columns: KL and cross-entropy; log-normalizers of the student at temperature 1, of both at the set one.
        self.kl_T1, self.cross_entropy_T1, self.student_T1, self.tempered_T1, self.teacher_T1 = torch.zeros(
            5, len(next_T), 1, dtype=self.exact, device=next_T.device
        )

    def add(self, rows: slice, student_TV: Tensor, teacher_TV: Tensor | None) -> None:
        """Take in whole rows of logits."""
        temperature = self.config.temperature
        parts = _token_losses(student_TV, teacher_TV, self.target_T1[rows], temperature, temperature != 1.0)
        columns = (self.student_T1, self.cross_entropy_T1, self.tempered_T1, self.teacher_T1, self.kl_T1)
        for column_T1, part_T1 in zip(columns, parts, strict=False):  # without a teacher there are three
            column_T1[rows] = part_T1

    def means(self) -> Tensor:
        """(3,) total, cross-entropy and KL over the tokens that are trained on."""
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
        of_total: Tensor,
        rows: slice = slice(None),
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """d total / d student for a block of rows and columns, in `dtype` or `exact`, after every row was taken in."""
        temperature, task_weight = self.config.temperature, self.config.task_weight
        return _logit_gradient(
            student_TV,
            teacher_TV,
            torch.cat([self.student_T1[rows], self.tempered_T1[rows], self.teacher_T1[rows]], dim=1),
            self.target_T1[rows] - (0 if columns is None else columns.start),
            self.ignored_T1[rows],
            (of_total / self.trained).to(self.exact),
            temperature,
            self.config.weight * temperature,
            task_weight,
            temperature != 1.0,
            self.exact if dtype is None else dtype,
        )


@fused(kernels=8, reads=2)
def _token_losses(
    student_TV: Tensor, teacher_TV: Tensor | None, target_T1: Tensor, temperature: float, tempered: bool
) -> list[Tensor]:
    """Both terms of the loss, and the log-normalizers of every row.

    Args:
        student_TV: whole rows of logits, in any floating dtype.
        teacher_TV: likewise, or None.
        target_T1: labels, 0 where they are ignored.
        temperature: of the KL.
        tempered: whether it is not 1.

    Returns:
        (T, 1) in fp32, or in fp64 where the logits are: log-normalizers of the student at temperature 1, cross-entropy,
        and log-normalizers of the student at the set temperature; with a teacher also its own, and KL.
    """
    high_T1, below_TV = _below(student_TV)
    if torch.compiler.is_compiling():  # nothing of a block's size is stored
        log_sum_T1 = below_TV.exp().sum(-1, keepdim=True).log()
        parts = [high_T1 + log_sum_T1, log_sum_T1 - below_TV.gather(1, target_T1)]
        if tempered:
            below_TV = below_TV / temperature
            high_T1 = high_T1 / temperature
            log_sum_T1 = below_TV.exp().sum(-1, keepdim=True).log()
        parts.append(high_T1 + log_sum_T1)
        if teacher_TV is None:
            return parts
        high_T1, above_TV = _below(teacher_TV)
        if tempered:
            above_TV = above_TV / temperature
            high_T1 = high_T1 / temperature
        share_TV = above_TV.exp()
        sum_T1 = share_TV.sum(-1, keepdim=True)
        kl_T1 = (share_TV * (above_TV - below_TV)).sum(-1, keepdim=True) / sum_T1 + log_sum_T1 - sum_T1.log()
        return [*parts, high_T1 + sum_T1.log(), kl_T1 * temperature * temperature]
    scratch_TV = below_TV.exp()
    log_sum_T1 = scratch_TV.sum(-1, keepdim=True).log_()
    parts = [high_T1 + log_sum_T1, log_sum_T1 - below_TV.gather(1, target_T1)]
    if tempered:
        torch.exp(below_TV.div_(temperature), out=scratch_TV)
        log_sum_T1 = scratch_TV.sum(-1, keepdim=True).log_()
    parts.append(high_T1 / temperature + log_sum_T1)
    if teacher_TV is None:
        return parts
    high_T1, above_TV = _below(teacher_TV)
    if tempered:
        above_TV.div_(temperature)
    torch.exp(above_TV, out=scratch_TV)
    sum_T1 = scratch_TV.sum(-1, keepdim=True)
    teacher_log_sum_T1 = sum_T1.log()
    parts.append(high_T1 / temperature + teacher_log_sum_T1)
    # sum of p (log p - log q), with the two constants of a row taken out of the sum
    kl_T1 = scratch_TV.mul_(above_TV.sub_(below_TV)).sum(-1, keepdim=True).div_(sum_T1)
    return [*parts, kl_T1.add_(log_sum_T1 - teacher_log_sum_T1).mul_(temperature**2)]


def _below(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, and by how much the others are below it: one kernel from 16 bits to 32."""
    high_T1 = logits_TV.amax(-1, keepdim=True).to(torch.promote_types(logits_TV.dtype, torch.float32))
    return high_T1, torch.sub(logits_TV, high_T1)


@fused()
def _logit_gradient(
    student_TV: Tensor,
    teacher_TV: Tensor | None,
    normalizer_T3: Tensor,
    place_T1: Tensor,
    ignored_T1: Tensor,
    scale: Tensor,
    temperature: float,
    kl_weight: float,
    task_weight: float,
    tempered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """d total / d student for a block of rows and columns of logits.

    d KL / d student = (softmax(student / T) - softmax(teacher / T)) / T, and T^2 of the loss makes that a factor T.

    Args:
        student_TV: logits, in any floating dtype.
        teacher_TV: likewise, or None.
        normalizer_T3: log-normalizers of the student at temperature 1, of both at the set one.
        place_T1: columns of the labels, which may lie outside of the block.
        ignored_T1: rows without a gradient.
        scale: () what comes from above, over the number of trained tokens.
        temperature: of the KL.
        kl_weight: of the KL, times the temperature.
        task_weight: of the cross-entropy.
        tempered: whether the temperature is not 1.
        dtype: of the result.
    """
    plain_T1, tempered_T1, teacher_T1 = normalizer_T3.split(1, dim=1)
    if torch.compiler.is_compiling():
        exact_TV = student_TV.to(normalizer_T3.dtype)
        gradient_TV = (exact_TV - plain_T1).exp() * task_weight
        if tempered:
            gradient_TV = gradient_TV + (exact_TV / temperature - tempered_T1).exp() * kl_weight
        else:
            gradient_TV = gradient_TV + (exact_TV - tempered_T1).exp() * kl_weight
        if teacher_TV is not None:
            above_TV = teacher_TV.to(normalizer_T3.dtype)
            above_TV = above_TV / temperature if tempered else above_TV
            gradient_TV = gradient_TV - (above_TV - teacher_T1).exp() * kl_weight
        column_V = torch.arange(student_TV.shape[1], device=student_TV.device)
        gradient_TV = torch.where(column_V == place_T1, gradient_TV - task_weight, gradient_TV)
        return torch.where(ignored_T1, 0.0, gradient_TV * scale).to(dtype)
    gradient_TV = _softmax(student_TV, tempered_T1, temperature)
    if not tempered:
        gradient_TV.mul_(kl_weight + task_weight)
    else:
        other_TV = _softmax(student_TV, plain_T1, 1.0)
        gradient_TV.mul_(kl_weight).add_(other_TV, alpha=task_weight)
        del other_TV
    if teacher_TV is not None:
        gradient_TV.sub_(_softmax(teacher_TV, teacher_T1, temperature), alpha=kl_weight)
    here_T1 = (place_T1 >= 0) & (place_T1 < student_TV.shape[1])
    gradient_TV.scatter_add_(1, place_T1.where(here_T1, 0), -task_weight * here_T1.to(gradient_TV.dtype))
    return gradient_TV.mul_(scale).masked_fill_(ignored_T1, 0.0).to(dtype)


def _softmax(logits_TV: Tensor, normalizer_T1: Tensor, temperature: float) -> Tensor:
    below_TV = torch.sub(logits_TV, normalizer_T1 * temperature)
    return (below_TV if temperature == 1.0 else below_TV.div_(temperature)).exp_()
