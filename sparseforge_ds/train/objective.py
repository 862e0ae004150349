"""Loss of a micro-batch: task, teacher and balance of experts, by blocks of logits where the models allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.config import DistillationConfig, SparseForgeConfig
from sparseforge_ds.data.micro_batch import MicroBatch
from sparseforge_ds.model.distill import DistillationLoss, distillation_loss, next_labels, task_loss
from sparseforge_ds.model.head import NonlinearHeadError, Target, hidden_states, loss_in_head
from sparseforge_ds.model.hidden import compare_hidden
from sparseforge_ds.model.registration import OWN_FAMILIES
from sparseforge_ds.model.teacher import Teacher
from sparseforge_ds.model.top_logits import TopLogits

LOSSES = ("total", "cross_entropy", "kl", "hidden", "balance")
"""Names of the losses in the log, as `loss/...`."""


def with_position_axis(logits: Tensor) -> Tensor:
    """Return (B, S, V) logits unchanged, and (B, classes) of whole sequences as (B, 1, classes)."""
    return logits[:, None] if logits.dim() == 2 else logits


class Objective:
    """Training objective of an engine.

    Args:
        engine: the student's engine.
        teacher: None for the task loss alone, or where micro-batches have the logits of one.
        config: the sparseforge block, of which `distillation` and `importance` are used.
    """

    def __init__(self, engine: Any, teacher: Teacher | None, config: SparseForgeConfig) -> None:
        self.engine = engine
        self.teacher = teacher if config.distillation is not None else None
        self.config = config.distillation
        self.whole: str | None = None
        """Reason why logits are made whole; None where they are made in blocks."""
        self.one_at_a_time = (
            self.teacher is not None and config.distillation is not None and bool(config.distillation.hidden)
        )
        """True if `targets` takes one micro-batch: hidden states of all would be as large as activations of all."""

    def why_whole_logits(self, token_BS: Tensor, **more: Tensor) -> str | None:
        """Run both models over a few tokens; return why their logits must be made whole, or None. Collective.

        Blocks of logits need models whose heads alone make logits of hidden states. Later calls go by the answer.

        Args:
            token_BS: (B, S) ids.
            **more: other inputs of the forward pass.
        """
        model = self.engine.module
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                hidden_states(model, lambda: model(input_ids=token_BS, use_cache=False, **more))
            if self.teacher is not None:
                self.teacher.hidden_states(token_BS, **more)
        except NonlinearHeadError as error:
            self.whole = str(error)
        finally:
            model.train(was_training)
        return self.whole

    @contextmanager
    def targets(self, micro_batches: Sequence[MicroBatch]) -> Iterator[Sequence[Target | TopLogits | None]]:
        """Hold the teacher's targets of a step's micro-batches, see `Teacher.targets`.

        Without a teacher they are its stored logits, or None.
        """
        if self.teacher is None or self.whole:
            yield [batch.top for batch in micro_batches]
        else:
            with self.teacher.targets([batch.inputs for batch in micro_batches]) as targets:
                yield targets

    def loss(
        self, batch: MicroBatch, target: Target | TopLogits | None, progress: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch, and its parts by `LOSSES`, (5,), for the log.

        The engine trains on the mean over all ranks.

        Args:
            batch: the micro-batch.
            target: its element of `targets`.
            progress: fraction of the run's steps that are done.
        """
        config = None if self.config is None else self.config.at(progress)
        if self.whole:
            losses, output = self._by_whole_logits(batch, config)
        else:
            losses, output = self._by_blocks(batch, config, target)
        balance = self._balance_loss(output)
        total = losses.total if balance is None else losses.total + balance
        logged_balance = torch.zeros_like(total) if balance is None else balance
        parts = [total, losses.cross_entropy, losses.kl, losses.hidden, logged_balance]
        return total, torch.stack([part.detach().float() for part in parts])

    def cross_entropy(self, batch: MicroBatch) -> Tensor:
        """Return the task loss alone, which probes of the curvature take."""
        if self.whole:
            logits_BSV = with_position_axis(self._run(batch).logits)
            return task_loss(logits_BSV, batch.label_BS, trained=batch.trained, shifted=batch.shifted)
        return self._by_blocks(batch)[0].total

    def _by_blocks(
        self,
        batch: MicroBatch,
        config: DistillationConfig | None = None,
        target: Target | TopLogits | None = None,
    ) -> tuple[DistillationLoss, Any]:
        """Return losses and the model's output; the head makes logits block by block, and none is kept."""
        inputs: dict[str, Any] = batch.inputs
        return loss_in_head(self.engine, batch.label_BS, config, target, batch.trained, batch.shifted, **inputs)

    def _by_whole_logits(self, batch: MicroBatch, config: DistillationConfig | None) -> tuple[DistillationLoss, Any]:
        """Return losses and the model's output, from (B, S, V) logits of both models."""
        label_BS = batch.label_BS
        if self.teacher is None or config is None:
            output = self._run(batch)
            student_BSV = with_position_axis(output.logits)
            if batch.top is not None and config is not None:
                return distillation_loss(student_BSV, batch.top, label_BS, config, batch.trained, batch.shifted), output
            total = task_loss(student_BSV, label_BS, trained=batch.trained, shifted=batch.shifted)
            zero = torch.zeros_like(total)
            return DistillationLoss(total, total.detach(), zero, zero), output
        # Run the teacher, and then the student beside the teacher's hidden states.
        with self.teacher.captured() as states:
            teacher_BSV = with_position_axis(self.teacher(**batch.inputs))
        next_T = next_labels(label_BS, batch.shifted)
        with compare_hidden(self.engine.module, states, next_T, config, batch.trained) as hidden_loss:
            output = self._run(batch)
        student_BSV = with_position_axis(output.logits)
        logits_config = replace(config, hidden=None)
        losses = distillation_loss(student_BSV, teacher_BSV, label_BS, logits_config, batch.trained, batch.shifted)
        return hidden_loss.add_to(losses), output

    def _run(self, batch: MicroBatch) -> Any:
        return self.engine(use_cache=False, **batch.inputs)

    def _balance_loss(self, output: Any) -> Tensor | None:
        """Return the loss of a mixture's uneven use of experts, where its config.json asks for it."""
        balance: Tensor | None = getattr(output, "aux_loss", None)
        if balance is None:
            return None
        # transformers' own mixtures give it bare, and multiply only in the loss that they make themselves.
        model = self.engine.module
        if model.config.model_type in OWN_FAMILIES:
            return balance
        text_config = model.config.get_text_config()
        attributes = ((model, "router_aux_loss_coef"), (model, "aux_loss_coef"), (text_config, "router_aux_loss_coef"))
        factor = next((getattr(owner, key) for owner, key in attributes if hasattr(owner, key)), None)
        return None if factor is None else balance * factor
