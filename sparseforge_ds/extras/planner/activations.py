"""Memory of a forward and backward pass, by running them on the meta device: shapes without numbers.

Every storage that the pass creates is followed from its birth to its end, so the estimate knows the model's real
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
    """What the forward pass keeps for the backward pass, without logits."""
    logits: int
    """Blocks of logits: the student's, and the teacher's where there is one."""
    loss: int
    """The most that exists beside `saved` while the loss and its gradient are formed: blocks of logits, and the
    gradient of the head's weight."""
    backward: int
    """The most that exists while blocks run backward, what is left of `saved` included: recomputed activations,
    gradients of activations, and the gradient of one weight before it is reduced."""
    teacher: int = 0
    """The most that exists while a teacher runs over the micro-batch, final hidden states included."""
    states: int = 0
    """The teacher's hidden states behind the layers that are compared."""

    @property
    def peak(self) -> int:
        """The most that exists at any time."""
        return max(self.saved + self.loss, self.backward)


def trace(
    config: PretrainedConfig,
    forge: SparseForgeConfig,
    *,
    dtype: torch.dtype,
    micro_batch: int,
    seq_length: int,
    checkpointing: bool,
    teacher: PretrainedConfig | None,
    parts: int = 1,
    heard: bool = False,
) -> Activations:
    """Run one micro-batch forward and backward without numbers.

    Raises ValueError where the forward pass of this model looks at numbers, so that it cannot be run without.

    Args:
        forge: its `distillation` and `low_rank` are used.
        seq_length: tokens of a sequence, of which a rank has one of the `parts`.
        checkpointing: whether the activations of every block are recomputed in the backward pass.
        teacher: of the model whose logits the loss compares with; None for the task loss alone.
        heard: whether the tokens of fused experts are listened to, so that a forward of ours computes these. For
            Llama 4 its own is taken, since ours looks at numbers: it keeps the rows that are routed once more.
    """
    model = empty_model(config, forge, dtype)
    model.train()
    if checkpointing:
        checkpoint_activations(model)
    token_BS = torch.zeros(micro_batch, seq_length // parts, dtype=torch.long, device="meta")
    with without_numbers(config), exchanged(model, parts):
        told = None if teacher is None else _Teacher(teacher, dtype, token_BS, forge.distillation)
        with expert_tokens(_fused_experts(model, forge), _hear_nothing) if heard else nullcontext():
            return _trace(model, token_BS, forge, told)


def _fused_experts(model: PreTrainedModel, forge: SparseForgeConfig) -> dict[str, nn.Module]:
    names = {weight.module for weight in prunable_weights(model, forge) if weight.experts and len(weight.shape) == 3}
    modules = {name: model.get_submodule(name) for name in names}
    return {name: module for name, module in modules.items() if not sees_all_tokens(module)}


def _hear_nothing(*_: Any) -> None:
    """In the place of what adds up squares, whose memory `planner.curvature.heard` knows."""


class _Teacher:
    """What a teacher says, and the bytes that it takes to say it. Without a target it says whole logits."""

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        token_BS: Tensor,
        distillation: DistillationConfig | None,
    ) -> None:
        model = bare_model(config, dtype).eval()
        hidden = distillation.hidden if distillation else None
        live = PeakMemoryCounter([*model.parameters(), *model.buffers(), token_BS])
        self.target: Target | None = None
        self.tensors: list[Tensor] = []
        layers = compared_layers(model, hidden) if hidden else []
        with live, torch.no_grad(), capture_states(layers) as states:
            try:
                hidden_BSH = hidden_states(model, lambda: model(input_ids=token_BS, use_cache=False))
                layer = head_of(model)
                self.target = Target(hidden_BSH, Head(layer.weight, layer.bias), states)
                self.tensors = [hidden_BSH, *layer.parameters()]
            except NonlinearHeadError:
                states.clear()
            if self.target is None:  # outside of the handler, where what the error holds is gone
                model(input_ids=token_BS, use_cache=False)
        self.states = states if layers else None
        self.states_bytes = sum(state.numel() * state.element_size() for state in self.states or ())
        self.tensors += self.states or ()
        self.bytes = live.peak - self.states_bytes


def _trace(model: PreTrainedModel, token_BS: Tensor, forge: SparseForgeConfig, teacher: _Teacher | None) -> Activations:
    live = PeakMemoryCounter([*model.parameters(), *model.buffers(), token_BS, *(teacher.tensors if teacher else ())])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    saved = peak_of_loss = 0

    def loss_is_over(_: Tensor) -> None:
        nonlocal peak_of_loss
        peak_of_loss = live.restart()

    def loss_begins(_: Any, inputs: tuple[Tensor, ...]) -> None:
        nonlocal saved
        saved = live.bytes
        live.restart()
        inputs[0].register_hook(loss_is_over)

    head = head_of(model)
    head.register_forward_pre_hook(loss_begins)
    config = forge.distillation.at(0.0) if teacher and forge.distillation else task_only()
    target = teacher.target if teacher else None
    whole = teacher is not None and target is None
    with live:
        if not whole:
            loss = loss_in_head(model, token_BS, config, target, input_ids=token_BS)[0].total
        else:
            assert teacher is not None
            with compare_hidden(model, teacher.states, next_labels(token_BS), config) as hidden_loss:
                logits_BSV = model(input_ids=token_BS, use_cache=False).logits
            losses = distillation_loss(logits_BSV, torch.empty_like(logits_BSV), token_BS, replace(config, hidden=None))
            loss = hidden_loss.add_to(losses).total
            del logits_BSV  # as in the training loop: the loss holds it until it has its gradient
        loss.backward()
    tokens = token_BS.numel() if whole else min(token_BS.numel(), tokens_per_block(config, head.out_features))
    return Activations(
        saved=saved,
        logits=tokens * head.out_features * head.weight.element_size() * (2 if teacher else 1),
        loss=peak_of_loss - saved,
        backward=live.peak,
        teacher=teacher.bytes if teacher else 0,
        states=teacher.states_bytes if teacher else 0,
    )


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
