"""Memory of a forward and backward pass, measured on the meta device: shapes without numbers.

Every storage that the pass creates is followed from its creation to its end, so the estimate is of the model's real
graph, whatever its family. Attention has the memory of a fused kernel.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from sparseforge_ds.config import DistillationConfig, SparseForgeConfig
from sparseforge_ds.model.architecture import bare_model, empty_model, without_numbers
from sparseforge_ds.model.distill import distillation_loss, next_labels, task_only, tokens_per_block
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.model.head import Head, NonlinearHeadError, Target, head_of, hidden_states, loss_in_head
from sparseforge_ds.model.hidden import capture_states, compare_hidden, compared_layers
from sparseforge_ds.model.peak_memory import PeakMemoryCounter
from sparseforge_ds.model.sequence_parallel import exchanged
from sparseforge_ds.transformers_internals import checkpoint_activations
from sparseforge_ds.zero.expert_hooks import expert_tokens, sees_all_tokens


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank, beyond weights and reduced gradients."""

    saved: int
    """Activations that the forward pass keeps for the backward pass, without logits."""
    logits: int
    """Blocks of logits: the student's, and the teacher's if there is one."""
    loss: int
    """Maximum beside `saved` while the loss and its gradient are formed: blocks of logits, and the gradient of the
    head's weight."""
    backward: int
    """Maximum while blocks run backward, including the rest of `saved`: recomputed activations, gradients of
    activations, and the gradient of one weight before it is reduced."""
    teacher: int = 0
    """Maximum while a teacher runs over the micro-batch, including its final hidden states."""
    states: int = 0
    """The teacher's hidden states of the layers that are compared."""

    @property
    def peak(self) -> int:
        """Maximum at any time."""
        return max(self.saved + self.loss, self.backward)


@dataclass(frozen=True)
class Pass:
    """Forward and backward pass of one micro-batch on one rank."""

    dtype: torch.dtype
    micro_batch: int
    """Number of sequences."""
    seq_length: int
    """Tokens of a complete sequence."""
    parts: int = 1
    """Ranks that share a sequence."""
    checkpointing: bool = False
    """True: the activations of every block are recomputed in the backward pass."""
    expert_hooks: bool = False
    """True: the tokens of fused experts are observed, for which our own forward replaces that of their modules.
    Llama 4 keeps its own forward here, since ours needs numbers; it keeps the routed rows once more."""


def trace(
    config: PretrainedConfig, forge: SparseForgeConfig, step: Pass, teacher: PretrainedConfig | None = None
) -> Activations:
    """Run one micro-batch forward and backward without numbers, and measure its memory.

    Args:
        config: the student.
        forge: the block, of which `distillation` and `low_rank` are used.
        step: the pass.
        teacher: config of the model that the loss compares with; None for the task loss alone.

    Raises:
        ValueError: the model's forward pass depends on numbers.
    """
    model = empty_model(config, forge, step.dtype)
    model.train()
    if step.checkpointing:
        checkpoint_activations(model)
    token_BS = torch.zeros(step.micro_batch, step.seq_length // step.parts, dtype=torch.long, device="meta")
    with without_numbers(config), exchanged(model, step.parts):
        # The teacher runs first, as in training.
        traced_teacher = None if teacher is None else _Teacher(teacher, step.dtype, token_BS, forge.distillation)
        with expert_tokens(_fused_experts(model, forge), _ignore_tokens) if step.expert_hooks else nullcontext():
            return _trace(model, token_BS, forge, traced_teacher)


def _fused_experts(model: PreTrainedModel, forge: SparseForgeConfig) -> dict[str, nn.Module]:
    """Return the modules of fused experts whose forward is replaced to observe tokens."""
    names = {weight.module for weight in prunable_weights(model, forge) if weight.experts and len(weight.shape) == 3}
    modules = {name: model.get_submodule(name) for name in names}
    return {name: module for name, module in modules.items() if not sees_all_tokens(module)}


def _ignore_tokens(*_: Any) -> None:
    """Do nothing: the memory of summing squares is counted by `curvature_memory.training_step_memory`."""


class _Teacher:
    """Tensors that a traced teacher hands to the loss, and the bytes of its pass.

    `target` is None for a teacher with a nonlinear head, which hands over complete logits.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        token_BS: Tensor,
        distillation: DistillationConfig | None,
    ) -> None:
        model = bare_model(config, dtype).eval()
        hidden = distillation.hidden if distillation else None
        counter = PeakMemoryCounter([*model.parameters(), *model.buffers(), token_BS])
        self.target: Target | None = None
        self.tensors: list[Tensor] = []
        layers = compared_layers(model, hidden) if hidden else []
        with counter, torch.no_grad(), capture_states(layers) as states:
            # Final hidden states, if the head is linear.
            try:
                hidden_BSH = hidden_states(model, lambda: model(input_ids=token_BS, use_cache=False))
                layer = head_of(model)
                self.target = Target(hidden_BSH, Head(layer.weight, layer.bias), states)
                self.tensors = [hidden_BSH, *layer.parameters()]
            except NonlinearHeadError:
                states.clear()
            if self.target is None:  # outside of the handler: the error holds tensors
                model(input_ids=token_BS, use_cache=False)
        # Hidden states of compared layers are counted apart: they stay until the loss.
        self.states = states if layers else None
        self.states_bytes = sum(state.numel() * state.element_size() for state in self.states or ())
        self.tensors += self.states or ()
        self.bytes = counter.peak - self.states_bytes


def _trace(model: PreTrainedModel, token_BS: Tensor, forge: SparseForgeConfig, teacher: _Teacher | None) -> Activations:
    """Measure the student's pass, with the teacher's tensors in memory but not counted."""
    teacher_tensors = teacher.tensors if teacher else ()
    counter = PeakMemoryCounter([*model.parameters(), *model.buffers(), token_BS, *teacher_tensors])
    # A gradient is gone as soon as it is accumulated: ZeRO reduces it.
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    saved = peak_of_loss = 0

    # The head's forward begins the loss, and the gradient of its input ends it.
    def end_loss(_: Tensor) -> None:
        nonlocal peak_of_loss
        peak_of_loss = counter.restart()

    def begin_loss(_: Any, inputs: tuple[Tensor, ...]) -> None:
        nonlocal saved
        saved = counter.bytes
        counter.restart()
        inputs[0].register_hook(end_loss)

    head = head_of(model)
    head.register_forward_pre_hook(begin_loss)
    # The loss of training: in blocks of tokens, or on complete logits.
    config = forge.distillation.at(0.0) if teacher and forge.distillation else task_only()
    target = teacher.target if teacher else None
    complete_logits = teacher is not None and target is None
    with counter:
        if not complete_logits:
            loss = loss_in_head(model, token_BS, config, target, input_ids=token_BS)[0].total
        else:
            assert teacher is not None
            with compare_hidden(model, teacher.states, next_labels(token_BS), config) as hidden_loss:
                logits_BSV = model(input_ids=token_BS, use_cache=False).logits
            losses = distillation_loss(logits_BSV, torch.empty_like(logits_BSV), token_BS, replace(config, hidden=None))
            loss = hidden_loss.add_to(losses).total
            del logits_BSV  # as in the training loop: the loss holds it until it has its gradient
        loss.backward()
    tokens = token_BS.numel() if complete_logits else min(token_BS.numel(), tokens_per_block(head.out_features))
    return Activations(
        saved=saved,
        logits=tokens * head.out_features * head.weight.element_size() * (2 if teacher else 1),
        loss=peak_of_loss - saved,
        backward=counter.peak,
        teacher=teacher.bytes if teacher else 0,
        states=teacher.states_bytes if teacher else 0,
    )


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
