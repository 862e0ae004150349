"""Memory of a forward and backward pass, by running them on the meta device: shapes without numbers.

Every storage that the pass creates is followed from its birth to its end, so the estimate knows the model's real
graph, whatever its family. Attention is a fused kernel (`planning.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from sparseforge_ds.config import DistillationConfig, SparseForgeConfig
from sparseforge_ds.model.distill import distillation_loss, task_loss
from sparseforge_ds.planning.architecture import empty_model
from sparseforge_ds.planning.live import Live


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank, beyond weights and reduced gradients."""

    saved: int
    """What the forward pass keeps for the backward pass, without logits."""
    logits: int
    """Logits of the student, and of the teacher where there is one."""
    loss: int
    """The most that exists beside `saved` while the loss and its gradient are formed, logits included."""
    backward: int
    """The most that exists while blocks run backward, what is left of `saved` included: recomputed activations,
    gradients of activations, and the gradient of one weight before it is reduced."""

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
    teacher: bool,
) -> Activations:
    """Run one micro-batch forward and backward without numbers.

    Args:
        config: of the model.
        forge: its `distillation` and `low_rank` are used.
        dtype: in which the model computes.
        micro_batch: sequences.
        seq_length: tokens of a sequence.
        checkpointing: whether the activations of every block are recomputed in the backward pass.
        teacher: whether the loss compares with a teacher's logits; without, it is the task loss of a probe.

    Raises:
        ValueError: the forward pass of this model looks at numbers, so it cannot be run without.
    """
    model = empty_model(config, forge, dtype)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    token_BS = torch.zeros(micro_batch, seq_length, dtype=torch.long, device="meta")
    try:
        return _trace(model, token_BS, forge.distillation if teacher else None)
    except (RuntimeError, AttributeError, LookupError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"a {config.model_type} model cannot be run on the meta device, where the planner measures activations: "
            f"{reason}"
        ) from error


def _trace(model: PreTrainedModel, token_BS: Tensor, distillation: DistillationConfig | None) -> Activations:
    live = Live()
    for tensor in [*model.parameters(), *model.buffers(), token_BS]:
        live.ignore(tensor)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    peak_of_loss = 0

    def loss_is_over(_: Tensor) -> None:
        nonlocal peak_of_loss
        peak_of_loss = live.restart()

    with live:
        logits_BSV = model(input_ids=token_BS, use_cache=False).logits
        logits = logits_BSV.untyped_storage().nbytes()
        saved = live.bytes - logits
        live.restart()
        logits_BSV.register_hook(loss_is_over)
        if distillation is None:
            loss = task_loss(logits_BSV, token_BS)
        else:
            loss = distillation_loss(logits_BSV, torch.empty_like(logits_BSV), token_BS, distillation).total
        del logits_BSV  # as in the training loop: the loss holds it until it has its gradient
        loss.backward()
    return Activations(
        saved=saved,
        logits=logits * (2 if distillation is not None else 1),
        loss=peak_of_loss - saved,
        backward=live.peak,
    )


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
