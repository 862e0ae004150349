"""The loss where the logits would be made: in the head of a causal language model, so that they never exist whole.

While a model runs, its head's forward gets the final hidden states and returns the losses in place of logits. The head
is still called as the module that it is, so whatever gathers, reduces or watches its weight (ZeRO-3, for one) sees one
call and one gradient, tied or not. Logits are made a block at a time: rows (tokens) in the forward pass, and columns
(entries of the vocabulary) in the backward pass, where a block gives its rows of the weight's gradient at once.

Shape suffixes: B sequences, S positions, T tokens (B * S), H hidden, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.model.distill import (
    DistillationLoss,
    TokenLosses,
    block_tokens,
    blocks,
    first_derivative_only,
    next_labels,
    parts_of,
    same_vocabulary,
    task_only,
)
from sparseforge_ds.model.hidden import compare_hidden

PASS_TOKENS = 2**14
"""Tokens of a rank that a teacher's pass may have: its activations are those of one block, without a graph."""


class WholeLogits(ValueError):
    """Between this model's final hidden states and its logits lies more than a linear layer."""


class Head(NamedTuple):
    """From final hidden states to logits."""

    weight: Tensor
    """(V, H)"""
    bias: Tensor | None
    """(V,)"""

    def logits(self, hidden_TH: Tensor, columns: slice = slice(None)) -> Tensor:
        """(T, V) or some columns of it."""
        weight_HV = self.weight[columns].T
        return hidden_TH @ weight_HV if self.bias is None else torch.addmm(self.bias[columns], hidden_TH, weight_HV)

    def to(self, dtype: torch.dtype) -> Head:
        """Cast, where that changes anything."""
        return Head(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class Target(NamedTuple):
    """What a teacher says of a micro-batch: logits, before they are made."""

    hidden_BSH: Tensor
    """Final hidden states, of whatever width."""
    head: Head
    states: list[Tensor] | None = None
    """(B, S, H) of each layer that is compared, with `distillation.hidden`."""


def micro_batches_at_once(tokens: int) -> int:
    """Of `tokens` tokens each, in one pass of a teacher."""
    return max(1, PASS_TOKENS // tokens)


def head_of(model: nn.Module) -> nn.Linear:
    """The layer that makes a causal language model's logits. Raises WholeLogits where it names none, or one that is no
    plain nn.Linear."""
    named: Any = model
    head = named.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise WholeLogits(f"the output embeddings of {type(model).__name__} are {type(head).__name__}, no nn.Linear")
    return head


def computed_in_head(model: nn.Module, run: Callable[[], Any], function: Callable[[Tensor], Tensor]) -> Any:
    """What `run()`, which calls the model once, returns, with `function(hidden)` for its logits.

    `function` gets the head's input, (B, S, H), inside the head's call. Raises WholeLogits where the model does
    something to logits after its head made them, or never calls it.
    """
    head: Any = head_of(model)
    returned: list[tuple[Tensor, int]] = []

    def forward(hidden_BSH: Tensor) -> Tensor:
        result = function(hidden_BSH)
        returned.append((result, result._version))
        return result

    before = vars(head).get("forward")
    head.forward = forward
    try:
        output = run()
    finally:
        del head.forward
        if before is not None:
            head.forward = before
    if len(returned) != 1:
        raise WholeLogits(f"{type(model).__name__} called its output embeddings {len(returned)} times for its logits")
    ((result, version),) = returned
    # By storage, because ZeRO-3 hands on a view of what a module returns.
    same = output.logits.untyped_storage()._cdata == result.untyped_storage()._cdata
    if not same or output.logits.shape != result.shape or result._version != version:
        raise WholeLogits(f"{type(model).__name__} scales or caps the logits that its output embeddings return")
    return output


def hidden_states(model: nn.Module, run: Callable[[], Any]) -> Tensor:
    """(B, S, H) final hidden states, the input of the head; arguments and errors of `computed_in_head`."""
    hidden: Tensor = computed_in_head(model, run, lambda hidden_BSH: hidden_BSH).logits
    return hidden


def loss_in_head(
    engine: Any,
    labels_BS: Tensor,
    config: DistillationConfig | None = None,
    target: Target | None = None,
    trained: float | None = None,
    shifted: bool = False,
    **inputs: Any,
) -> tuple[DistillationLoss, Any]:
    """Run a model and form its loss, `distillation_loss` to rounding, without the logits of either model.

    At most 2**25 logits of a model exist at a time, and no more than of `config.chunk_tokens` tokens.

    Args:
        engine: a DeepSpeed engine, or the model itself.
        labels_BS: (B, S) unshifted token ids, the same ids at the same places as the inputs; -100 is ignored.
        config: weights, temperature and the tokens of a block; None for the task loss alone.
        target: what the teacher says of these inputs (`Teacher.targets`); None for the task loss alone. Its states are
            let go of in the backward pass.
        trained: what sums over the labels that are not ignored are divided by, see `distillation_loss`.
        shifted: whether the labels are what each position predicts, see `distillation_loss`.
        **inputs: of the forward pass, `input_ids` above all.

    Returns:
        The losses, and the model's output, whose `logits` mean nothing. A balance loss of experts is not in the losses.

    Raises:
        ValueError: two different vocabularies, or a weight that changes in the course of a run.
        WholeLogits: a model that scales or caps its logits: use `distillation_loss` on whole ones.
    """
    model = getattr(engine, "module", engine)
    head = head_of(model)
    config = task_only() if config is None or target is None else config
    if config.hidden is not None and config.hidden.until is not None:
        raise ValueError(
            f"distillation.hidden.until = {config.hidden.until:g}: one loss does not know how far the run is; give it "
            "config.at(step / max_steps)"
        )
    teacher: tuple[Tensor | None, ...] = (None, None, None)
    if target is not None:
        same_vocabulary(head.out_features, target.head.weight.shape[0])
        teacher = (target.hidden_BSH.detach().flatten(0, 1), *target.head)
    next_T = next_labels(labels_BS, shifted)

    def losses(hidden_BSH: Tensor) -> Tensor:
        if hidden_BSH.shape[:2] != labels_BS.shape:
            raise ValueError(f"labels {tuple(labels_BS.shape)} do not belong to inputs {tuple(hidden_BSH.shape[:2])}")
        dtype = _computing(hidden_BSH)
        found: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden_BSH.flatten(0, 1), head.weight, head.bias, *teacher, next_T, config, dtype, trained
        )
        return found

    with compare_hidden(model, target.states if target else None, next_T, config, trained) as hidden_loss:
        output = computed_in_head(model, lambda: engine(use_cache=False, **inputs), losses)
    return hidden_loss.add_to(parts_of(output.logits)), output


def _computing(hidden: Tensor) -> torch.dtype:
    """In which dtype a linear layer computes here, autocast included."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if _casts(kind) else hidden.dtype


def _casts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


class _HeadLoss(torch.autograd.Function):
    """Equation 12 from final hidden states; never more than a block of the logits of each model."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        teacher_TH: Tensor | None,
        teacher_weight_VH: Tensor | None,
        teacher_bias_V: Tensor | None,
        next_T: Tensor,
        config: DistillationConfig,
        dtype: torch.dtype,
        trained: float | None,
    ) -> Tensor:
        given = (hidden_TH, weight_VH, bias_V, teacher_TH, teacher_weight_VH, teacher_bias_V)
        ctx.save_for_backward(*given)
        ctx.dtype, ctx.size, ctx.kept = dtype, block_tokens(config, len(weight_VH)), None
        ctx.tokens = TokenLosses(next_T, config, dtype, trained)
        kind = hidden_TH.device.type
        with torch.autocast(kind, enabled=False) if _casts(kind) else nullcontext():
            student, teacher = _logits_of(given, dtype)
            if len(next_T) <= ctx.size:  # the one block is not made again
                ctx.kept = student(slice(None)), teacher(slice(None))
                ctx.tokens.add(slice(None), *ctx.kept)
            else:
                for rows in blocks(len(next_T), ctx.size):
                    ctx.tokens.add(rows, student(rows), teacher(rows))
            return ctx.tokens.means()

    @staticmethod
    def backward(ctx: Any, *of_losses: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        hidden_TH, weight_VH, bias_V, *_ = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        (T, H), V = hidden_TH.shape, len(weight_VH)
        student, teacher = _logits_of(ctx.saved_tensors, ctx.dtype)
        exact = ctx.tokens.exact
        hidden, head = hidden_TH.to(ctx.dtype), Head(weight_VH, None).to(ctx.dtype)
        # In fp32, because it is a sum over blocks; each row of the weight's gradient is of one block.
        grad_TH = torch.zeros(T, H, dtype=exact, device=hidden.device) if of_hidden else None
        grad_VH = torch.empty_like(weight_VH) if of_weight else None
        grad_V = torch.empty_like(bias_V) if of_bias and bias_V is not None else None
        for columns in blocks(V, V if ctx.kept else _columns(ctx.size * V // T)):
            student_TV, teacher_TV = ctx.kept or (student(slice(None), columns), teacher(slice(None), columns))
            gradient_TV = ctx.tokens.gradient(student_TV, teacher_TV, of_losses[0][0], columns=columns, dtype=ctx.dtype)
            del student_TV, teacher_TV
            if grad_TH is not None:
                grad_TH += gradient_TV @ head.weight[columns]
            if grad_VH is not None:
                grad_VH[columns] = gradient_TV.T @ hidden
            if grad_V is not None:
                grad_V[columns] = gradient_TV.sum(0)
        return (None if grad_TH is None else grad_TH.to(hidden_TH.dtype), grad_VH, grad_V, *[None] * 7)


def _columns(most: int) -> int:
    """Aligned, for tensor cores."""
    return most // 64 * 64 or max(1, most)


def _logits_of(
    given: tuple[Tensor | None, ...], dtype: torch.dtype
) -> tuple[Callable[..., Tensor], Callable[..., Tensor | None]]:
    """Functions of (rows, columns) that make a block of the student's and the teacher's logits."""
    hidden_TH, weight_VH, bias_V, teacher_TH, teacher_weight_VH, teacher_bias_V = given
    assert hidden_TH is not None and weight_VH is not None
    hidden, head = hidden_TH.to(dtype), Head(weight_VH, bias_V).to(dtype)

    def student(rows: slice, columns: slice = slice(None)) -> Tensor:
        return head.logits(hidden[rows], columns)

    def teacher(rows: slice, columns: slice = slice(None)) -> Tensor | None:
        if teacher_TH is None or teacher_weight_VH is None:
            return None
        return Head(teacher_weight_VH, teacher_bias_V).logits(teacher_TH[rows], columns)

    return student, teacher
