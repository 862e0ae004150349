"""Training loss computed inside the head of a causal language model, so that all logits never exist at once.

While a model runs, its head's forward gets the final hidden states and returns the losses in place of logits. The head
is still called as a module, so whatever gathers, reduces or watches its weight (ZeRO-3, for one) sees one call and one
gradient, tied or not. Logits are computed a block at a time: rows (tokens) in the forward pass, and columns (entries of
the vocabulary) in the backward pass, in which a block gives its rows of the weight's gradient at once.

Shape suffixes: B sequences, S positions, T tokens (B * S), H hidden, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.model.distill import (
    DistillationLoss,
    block_slices,
    check_same_vocabulary,
    next_labels,
    refuse_second_derivative,
    task_only,
    tokens_per_block,
    unpack_losses,
)
from sparseforge_ds.model.hidden import compare_hidden
from sparseforge_ds.model.token_losses import TokenLosses
from sparseforge_ds.model.top_logits import TopLogits, TopTeacher

PASS_TOKENS = 2**14
"""Most tokens of a rank in one pass of a teacher, whose activations are those of one block, without a graph."""


class NonlinearHeadError(ValueError):
    """Error of a model whose logits are more than a linear layer of its final hidden states."""


class Head(NamedTuple):
    """Linear map from final hidden states to logits."""

    weight: Tensor
    """(V, H)"""
    bias: Tensor | None
    """(V,)"""

    def logits(self, hidden_TH: Tensor, columns: slice = slice(None)) -> Tensor:
        """Compute logits (T, V), or some columns of them, from hidden states (T, H)."""
        weight_HV = self.weight[columns].T
        return hidden_TH @ weight_HV if self.bias is None else torch.addmm(self.bias[columns], hidden_TH, weight_HV)

    def to(self, dtype: torch.dtype) -> Head:
        """Return the head in another dtype."""
        return Head(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class Target(NamedTuple):
    """A teacher's answer to a micro-batch: the parts that its logits are computed from."""

    hidden_BSH: Tensor
    """Final hidden states, of any width."""
    head: Head
    states: list[Tensor] | None = None
    """Hidden states (B, S, H) behind each compared layer, with `distillation.hidden`."""


def micro_batches_at_once(tokens: int) -> int:
    """Return the number of micro-batches of `tokens` tokens in one pass of a teacher."""
    return max(1, PASS_TOKENS // tokens)


def head_of(model: nn.Module) -> nn.Linear:
    """Return the layer that computes a causal language model's logits.

    Raises:
        NonlinearHeadError: the model names no such layer, or it is no plain nn.Linear.
    """
    language_model: Any = model
    head = language_model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise NonlinearHeadError(
            f"the output embeddings of {type(model).__name__} are {type(head).__name__}, no nn.Linear"
        )
    return head


def replace_logits(model: nn.Module, run: Callable[[], Any], function: Callable[[Tensor], Tensor]) -> Any:
    """Run a model with `function(hidden)` in the place of its logits, and return its output.

    Args:
        model: a causal language model.
        run: calls the model once.
        function: gets the head's input, (B, S, H), inside the head's call.

    Raises:
        NonlinearHeadError: the model changes its logits behind the head, or never calls the head.
    """
    head: Any = head_of(model)
    results: list[tuple[Tensor, int]] = []

    def forward(hidden_BSH: Tensor) -> Tensor:
        result = function(hidden_BSH)
        results.append((result, result._version))
        return result

    # A forward on the instance hides that of the class, and perhaps one that somebody else has put there.
    previous_forward = vars(head).get("forward")
    head.forward = forward
    try:
        output = run()
    finally:
        del head.forward
        if previous_forward is not None:
            head.forward = previous_forward
    # The output must have the function's result, unchanged.
    if len(results) != 1:
        raise NonlinearHeadError(
            f"{type(model).__name__} called its output embeddings {len(results)} times for its logits"
        )
    ((result, version),) = results
    # Storages are compared, because ZeRO-3 hands on a view of a module's output.
    same = output.logits.untyped_storage()._cdata == result.untyped_storage()._cdata
    if not same or output.logits.shape != result.shape or result._version != version:
        raise NonlinearHeadError(f"{type(model).__name__} scales or caps the logits that its output embeddings return")
    return output


def refuse_labels(inputs: Mapping[str, Any]) -> None:
    """Raise ValueError for labels among a model's inputs: it would form its loss of what replaces its logits."""
    if "labels" in inputs:
        raise ValueError(
            "labels are among the inputs of the forward pass, whose logits are replaced; leave them out there, and "
            "give them to loss_in_head as its second argument"
        )


def hidden_states(model: nn.Module, run: Callable[[], Any]) -> Tensor:
    """Run a model and return its final hidden states (B, S, H); arguments and errors of `replace_logits`."""
    hidden: Tensor = replace_logits(model, run, lambda hidden_BSH: hidden_BSH).logits
    return hidden


def loss_in_head(
    engine: Any,
    labels_BS: Tensor,
    config: DistillationConfig | None = None,
    target: Target | TopLogits | None = None,
    trained: float | None = None,
    shifted: bool = False,
    **inputs: Any,
) -> tuple[DistillationLoss, Any]:
    """Run a model and compute its loss without the logits of either model.

    The result equals `distillation_loss` to rounding. At most 2**25 logits of a model exist at a time, and no more than
    those of 1,024 tokens.

    Args:
        engine: a DeepSpeed engine, or the model itself.
        labels_BS: (B, S) token ids at the positions of the inputs, unshifted; -100 is ignored.
        config: weights and temperature; None for the task loss alone.
        target: the teacher's answer to these inputs (`Teacher.targets`), or its largest logits (eq. 12c); None for the
            task loss alone. Its states are freed in the backward pass.
        trained: divisor of the sums over labels, see `distillation_loss`.
        shifted: True if labels stand at the positions that predict them, see `distillation_loss`.
        **inputs: of the forward pass, `input_ids` above all.

    Returns:
        The losses, and the model's output, whose `logits` mean nothing. The losses have no balance loss of experts.

    Raises:
        ValueError: two different vocabularies, labels among the inputs, or a config whose weight of hidden states still
            depends on the step.
        NonlinearHeadError: a model that scales or caps its logits: use `distillation_loss` on whole ones.
    """
    refuse_labels(inputs)
    model = getattr(engine, "module", engine)
    head = head_of(model)
    config = task_only() if config is None or target is None else config
    if config.hidden is not None and config.hidden.until is not None:
        raise ValueError(
            f"distillation.hidden.until = {config.hidden.until:g}: one loss does not know how far the run is; give it "
            "config.at(step / max_steps)"
        )
    # A teacher's three tensors, or none of them, enter the loss as constants.
    teacher: tuple[Tensor | None, ...] = (None, None, None)
    if isinstance(target, Target):
        check_same_vocabulary(head.out_features, target.head.weight.shape[0])
        teacher = (target.hidden_BSH.detach().flatten(0, 1), *target.head)
    next_T = next_labels(labels_BS, shifted)

    def losses(hidden_BSH: Tensor) -> Tensor:
        if hidden_BSH.shape[:2] != labels_BS.shape:
            raise ValueError(f"labels {tuple(labels_BS.shape)} do not belong to inputs {tuple(hidden_BSH.shape[:2])}")
        top = target if isinstance(target, TopLogits) else None
        setup = _LossSetup(next_T, config, _compute_dtype(hidden_BSH), trained, top)
        losses_3: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden_BSH.flatten(0, 1), head.weight, head.bias, *teacher, setup
        )
        return losses_3

    # Hidden states are compared in the same pass.
    states = target.states if isinstance(target, Target) else None
    with compare_hidden(model, states, next_T, config, trained) as hidden_loss:
        output = replace_logits(model, lambda: engine(use_cache=False, **inputs), losses)
    return hidden_loss.add_to(unpack_losses(output.logits)), output


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes, autocast included."""
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if _is_autocast(device_type) else hidden.dtype


def _is_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


@dataclass(frozen=True)
class _LossSetup:
    """Arguments of a loss that have no gradient."""

    next_T: Tensor
    """Label that each token predicts."""
    config: DistillationConfig
    dtype: torch.dtype
    """Dtype in which logits are computed."""
    trained: float | None
    top: TopLogits | None = None
    """The teacher's largest logits, in place of its hidden states and head."""


class _LogitSource(NamedTuple):
    """Final hidden states and the head of one model, from which any block of its logits can be computed."""

    hidden_TH: Tensor
    head: Head

    def block(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Compute the logits of some tokens and entries of the vocabulary."""
        return self.head.logits(self.hidden_TH[rows], columns)


class _HeadLoss(torch.autograd.Function):
    """Equation 12 from final hidden states, with at most a block of the logits of each model at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        teacher_TH: Tensor | None,
        teacher_weight_VH: Tensor | None,
        teacher_bias_V: Tensor | None,
        setup: _LossSetup,
    ) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, teacher_TH, teacher_weight_VH, teacher_bias_V)
        ctx.dtype = setup.dtype
        ctx.block_rows = tokens_per_block(len(weight_VH))
        ctx.tokens = TokenLosses(setup.next_T, setup.config, setup.dtype, setup.trained)
        ctx.top = None if setup.top is None else TopTeacher(setup.top, setup.config.temperature, ctx.tokens.exact)
        ctx.only_block = None
        device_type = hidden_TH.device.type
        with torch.autocast(device_type, enabled=False) if _is_autocast(device_type) else nullcontext():
            student = _LogitSource(hidden_TH.to(setup.dtype), Head(weight_VH, bias_V).to(setup.dtype))
            teacher = _teacher_source(teacher_TH, teacher_weight_VH, teacher_bias_V)
            # The logits of a small batch are one block, which the backward pass uses again.
            if len(setup.next_T) <= ctx.block_rows:
                student_TV = student.block()
                ctx.only_block = student_TV, _teacher_rows(teacher, ctx.top, student_TV, slice(None))
                ctx.tokens.add(slice(None), *ctx.only_block)
            else:
                for rows in block_slices(len(setup.next_T), ctx.block_rows):
                    student_TV = student.block(rows)
                    ctx.tokens.add(rows, student_TV, _teacher_rows(teacher, ctx.top, student_TV, rows))
            return ctx.tokens.means()

    @staticmethod
    def backward(ctx: Any, grad_3: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        hidden_TH, weight_VH, bias_V, *teacher_tensors = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        T, H = hidden_TH.shape
        V = len(weight_VH)
        student = _LogitSource(hidden_TH.to(ctx.dtype), Head(weight_VH, bias_V).to(ctx.dtype))
        teacher = _teacher_source(*teacher_tensors)
        # The gradient of hidden states is a sum over blocks, so in fp32; each row of the weight's is of one block.
        grad_TH = torch.zeros(T, H, dtype=ctx.tokens.exact, device=hidden_TH.device) if needs_hidden else None
        grad_VH = torch.empty_like(weight_VH) if needs_weight else None
        grad_V = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None
        block_columns = V if ctx.only_block else _aligned(ctx.block_rows * V // T)
        for columns in block_slices(V, block_columns):
            if ctx.only_block:
                student_TV, teacher_TV = ctx.only_block
            else:
                student_TV = student.block(columns=columns)
                teacher_TV = None if teacher is None else teacher.block(columns=columns)
                teacher_TV = ctx.top.columns(student_TV, columns) if ctx.top is not None else teacher_TV
            gradient_TV = ctx.tokens.gradient(student_TV, teacher_TV, grad_3[0], columns=columns, dtype=ctx.dtype)
            del student_TV, teacher_TV
            if grad_TH is not None:
                grad_TH += gradient_TV @ student.head.weight[columns]
            if grad_VH is not None:
                grad_VH[columns] = gradient_TV.T @ student.hidden_TH
            if grad_V is not None:
                grad_V[columns] = gradient_TV.sum(0)
        return (None if grad_TH is None else grad_TH.to(hidden_TH.dtype), grad_VH, grad_V, None, None, None, None)


def _teacher_source(hidden_TH: Tensor | None, weight_VH: Tensor | None, bias_V: Tensor | None) -> _LogitSource | None:
    """Return the source of a teacher's logits, or None without a teacher."""
    if hidden_TH is None or weight_VH is None:
        return None
    return _LogitSource(hidden_TH, Head(weight_VH, bias_V))


def _teacher_rows(
    teacher: _LogitSource | None, top: TopTeacher | None, student_TV: Tensor, rows: slice
) -> Tensor | None:
    """Return a block of the teacher's logits, or None without a teacher."""
    if top is not None:
        return top.rows(student_TV, rows)
    return None if teacher is None else teacher.block(rows)


def _aligned(columns: int) -> int:
    """Round down to a multiple of 64 for tensor cores, but not to 0."""
    return columns // 64 * 64 or max(1, columns)
