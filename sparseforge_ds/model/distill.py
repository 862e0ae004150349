"""Knowledge distillation from the frozen dense model (eq. 12), as a loss of logits.

    L = l_task * CE(student, labels) + l_KL * T^2 * KL(softmax(teacher / T) || softmax(student / T))

Vocabularies are large: the fp32 log-probabilities of one sequence can outweigh the model. Both terms and their gradient
are therefore formed a block of logits at a time (`model.token_losses`). `model.head` does the same without ever having
all logits.

Shape suffixes: B sequences, S positions, T tokens (of a block, or all B * S), V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.mask.kernels.fusing import is_compiled
from sparseforge_ds.model.token_losses import IGNORED as IGNORED
from sparseforge_ds.model.token_losses import TokenLosses
from sparseforge_ds.model.top_logits import TopLogits, TopTeacher

CHUNK_TOKENS = 1024
"""Most tokens in a block, whose log-probabilities are in fp32."""
BLOCK = 2**25
"""Most logits of a model in a block, so that a large vocabulary makes blocks of fewer tokens."""


class DistillationLoss(NamedTuple):
    """Losses of a batch: scalars in fp32, each the mean over the tokens that are not ignored."""

    total: Tensor
    """task_weight * cross_entropy + weight * kl + hidden.weight * hidden; the only one with a gradient."""
    cross_entropy: Tensor
    """Next-token cross-entropy, for the log."""
    kl: Tensor
    """KL from the teacher, times the squared temperature, for the log."""
    hidden: Tensor
    """Mean relative squared distance of the hidden states (`model.hidden`), for the log; 0 if none are compared."""


def distillation_loss(
    student_logits_BSV: Tensor,
    teacher_logits_BSV: Tensor | TopLogits,
    labels_BS: Tensor,
    config: DistillationConfig,
    trained: float | None = None,
    shifted: bool = False,
) -> DistillationLoss:
    """Compute the training loss from the logits of both models.

    As in transformers' causal models, the shift by one is inside: logits at position s predict label s + 1.

    The backward pass forms the gradient block by block in fp32, with the factor of fp16's loss scaling, and then stores
    it in the dtype of the logits. A non-finite logit gives a non-finite loss. A batch in which every label is ignored
    gives NaN, like `torch.nn.functional.cross_entropy`, or 0 with `trained`.

    Args:
        student_logits_BSV: (B, S, V) in any floating dtype.
        teacher_logits_BSV: (B, S, V), no gradient flows to it; or a teacher's largest logits (eq. 12c).
        labels_BS: (B, S) token ids at the positions of the inputs, unshifted; -100 is ignored.
        config: weights and temperature.
        trained: divisor of the sums over labels; None for the number of labels here that are not ignored. Give the
            number in a whole step, divided by its micro-batches on all ranks: then the mean of the losses over
            micro-batches is the loss of the step.
        shifted: True if labels stand at the positions that predict them, as transformers' `shift_labels`. A part of a
            sequence needs that: its last token predicts one of the next part.

    Raises:
        ValueError: shapes that do not belong together, such as two different vocabularies; a config with
            `distillation.hidden`, which needs more than logits.
    """
    # Inputs that do not belong together give a number, but no loss.
    B, S, V = student_logits_BSV.shape
    if config.hidden is not None:
        raise ValueError(
            "distillation.hidden is set, but distillation_loss sees logits alone; use loss_in_head with the targets of "
            "a Teacher, which compares hidden states too, or set it to null"
        )
    teacher: Tensor | TopLogits
    if isinstance(teacher_logits_BSV, TopLogits):
        teacher = teacher_logits_BSV
        teacher_shape = (*teacher.entry_BSK.shape[:2], V)
    else:
        teacher_shape = tuple(teacher_logits_BSV.shape)
        teacher = teacher_logits_BSV.detach().reshape(-1, teacher_shape[-1])
    check_same_vocabulary(V, teacher_shape[-1])
    if teacher_shape != (B, S, V) or labels_BS.shape != (B, S):
        raise ValueError(
            f"student logits {(B, S, V)}, teacher logits {teacher_shape} and labels "
            f"{tuple(labels_BS.shape)} do not belong together; give (B, S, V), (B, S, V) and (B, S) of one batch"
        )
    losses = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        student_logits_BSV.reshape(-1, V),
        teacher,
        next_labels(labels_BS, shifted),
        config,
        trained,
    )
    return unpack_losses(losses)


def task_loss(logits_BSV: Tensor, labels_BS: Tensor, trained: float | None = None, shifted: bool = False) -> Tensor:
    """Compute the next-token cross-entropy without a teacher, () in fp32.

    Args:
        logits_BSV: (B, S, V) in any floating dtype.
        labels_BS: as in `distillation_loss`.
        trained: as in `distillation_loss`.
        shifted: as in `distillation_loss`.
    """
    losses: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        logits_BSV.flatten(0, 1), None, next_labels(labels_BS, shifted), task_only(), trained
    )
    return losses[0]


def task_only() -> DistillationConfig:
    """Return the config of a loss without a teacher."""
    return DistillationConfig(weight=0.0, task_weight=1.0)


def next_labels(labels_BS: Tensor, shifted: bool = False) -> Tensor:
    """Return the label that each position predicts, (B * S,).

    Labels are shifted, not logits, so that blocks of logits are views. If `shifted`, they already stand at the
    positions that predict them.
    """
    return labels_BS.reshape(-1) if shifted else F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED).reshape(-1)


def unpack_losses(losses: Tensor) -> DistillationLoss:
    """Name the losses (3,) total, cross-entropy and KL; the total alone keeps its graph."""
    total, cross_entropy, kl = losses
    return DistillationLoss(total, cross_entropy.detach(), kl.detach(), torch.zeros_like(kl.detach()))


def check_same_vocabulary(student: int, teacher: int) -> None:
    """Raise ValueError unless both vocabularies, given as numbers of entries, have the same size."""
    if student != teacher:
        raise ValueError(
            f"the teacher's vocabulary has {teacher} entries and the student's {student}; distillation compares them "
            "entry by entry, so use a teacher with the same tokenizer and the same padding of its head, or set "
            "distillation to null. After resize_token_embeddings the teacher is the resized dense model: save it "
            "before training (save_pretrained), and give that folder"
        )


def block_slices(total: int, size: int) -> Iterator[slice]:
    """Divide `range(total)` into slices of at most `size`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def tokens_per_block(vocabulary: int) -> int:
    """Return the tokens in a block of whole rows of logits."""
    return max(1, min(CHUNK_TOKENS, BLOCK // vocabulary))


class _ChunkedLoss(torch.autograd.Function):
    """Equation 12 on flat tokens, with at most one fp32 block of (tokens, vocabulary) at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        student_TV: Tensor,
        teacher: Tensor | TopLogits | None,
        next_T: Tensor,
        config: DistillationConfig,
        trained: float | None,
    ) -> Tensor:
        tokens = TokenLosses(next_T, config, student_TV.dtype, trained)
        ctx.top = TopTeacher(teacher, config.temperature, tokens.exact) if isinstance(teacher, TopLogits) else None
        teacher_TV = None if isinstance(teacher, TopLogits) else teacher
        for rows in block_slices(len(next_T), tokens_per_block(student_TV.shape[1])):
            tokens.add(rows, student_TV[rows], _teacher_rows(ctx.top, teacher_TV, student_TV, rows))
        ctx.save_for_backward(student_TV, teacher_TV)
        ctx.tokens = tokens
        return tokens.means()

    @staticmethod
    def backward(ctx: Any, grad_3: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        student_TV, teacher_TV = ctx.saved_tensors
        tokens: TokenLosses = ctx.tokens
        gradient_TV = torch.empty_like(student_TV)
        for rows in block_slices(len(student_TV), tokens_per_block(student_TV.shape[1])):
            teacher = _teacher_rows(ctx.top, teacher_TV, student_TV, rows)
            # A compiled kernel casts its result; step by step the copy does.
            dtype = student_TV.dtype if is_compiled(student_TV.device) else None
            gradient_TV[rows] = tokens.gradient(student_TV[rows], teacher, grad_3[0], rows=rows, dtype=dtype)
        return gradient_TV, None, None, None, None


def _teacher_rows(top: TopTeacher | None, teacher_TV: Tensor | None, student_TV: Tensor, rows: slice) -> Tensor | None:
    """Return a block of the teacher's logits, or None without a teacher."""
    if top is not None:
        return top.rows(student_TV[rows], rows)
    return None if teacher_TV is None else teacher_TV[rows]


def refuse_second_derivative() -> None:
    """Raise ValueError in a backward pass with create_graph, whose graph would lack what is computed in place."""
    if torch.is_grad_enabled():
        raise ValueError(
            "distillation_loss has no second derivative; call backward without create_graph=True, or use "
            "torch.nn.functional.cross_entropy and kl_div where a double backward is wanted"
        )
