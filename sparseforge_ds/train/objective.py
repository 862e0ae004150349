"""The loss of a micro-batch: task, teacher and balance of experts, by blocks of logits where the models allow it."""

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

LOSSES = ("total", "cross_entropy", "kl", "hidden", "balance")
"""What the log says of a loss, as `loss/...`."""


def with_position_axis(logits: Tensor) -> Tensor:
    """(B, S, V) as they are; (B, classes) of whole sequences -> (B, 1, classes)."""
    return logits[:, None] if logits.dim() == 2 else logits


class Objective:
    """What an engine is trained on.

    Args:
        engine: the student's.
        teacher: None for the task loss alone.
        config: its `distillation` and `importance` are used.
    """

    def __init__(self, engine: Any, teacher: Teacher | None, config: SparseForgeConfig) -> None:
        self.engine = engine
        self.teacher = teacher if config.distillation is not None else None
        self.config = config.distillation
        self.whole: str | None = None
        """Why logits are made whole; None where blocks of them do."""
        self.one_at_a_time = (
            self.teacher is not None and config.distillation is not None and bool(config.distillation.hidden)
        )
        """Whether `targets` takes one micro-batch: hidden states of all would be as large as activations of all."""

    def why_whole_logits(self, token_BS: Tensor, **more: Tensor) -> str | None:
        """Run both models over a few tokens, to see whether logits are made by their heads alone; collective.

        Args:
            token_BS: (B, S) ids.
            **more: other inputs of the forward pass.

        Returns:
            Why not, where they are not.
        """
        model = self.engine.module
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                hidden_states(model, lambda: model(input_ids=token_BS, use_cache=False, **more))
            if self.teacher is not None:
                self.teacher.hidden_states(token_BS, **more)
        except NonlinearHeadError as error:
            self.whole = str(error)
        finally:
            model.train(training)
        return self.whole

    @contextmanager
    def targets(self, micro_batches: Sequence[MicroBatch]) -> Iterator[Sequence[Target | None]]:
        """What the teacher says of the micro-batches of a step, while this is active, as `Teacher.targets`."""
        if self.teacher is None or self.whole:
            yield [None] * len(micro_batches)
        else:
            with self.teacher.targets([batch.inputs for batch in micro_batches]) as targets:
                yield targets

    def loss(self, batch: MicroBatch, target: Target | None, progress: float = 0.0) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, and its `LOSSES` for the log; the mean over all ranks counts.

        Args:
            batch: the micro-batch.
            target: its own, of `targets`.
            progress: the fraction of the run's steps that are made.
        """
        config = None if self.config is None else self.config.at(progress)
        if self.whole:
            losses, output = self._of_whole_logits(batch, config)
        else:
            losses, output = self._in_head(batch, config, target)
        balance = self._balance_loss(output)
        total = losses.total if balance is None else losses.total + balance
        uneven = torch.zeros_like(total) if balance is None else balance
        parts = [total, losses.cross_entropy, losses.kl, losses.hidden, uneven]
        return total, torch.stack([part.detach().float() for part in parts])

    def cross_entropy(self, batch: MicroBatch) -> Tensor:
        """The task loss alone, which probes of the curvature take."""
        if self.whole:
            logits_BSV = with_position_axis(self._run(batch).logits)
            return task_loss(logits_BSV, batch.label_BS, trained=batch.trained, shifted=batch.shifted)
        return self._in_head(batch)[0].total

    def _in_head(
        self, batch: MicroBatch, config: DistillationConfig | None = None, target: Target | None = None
    ) -> tuple[DistillationLoss, Any]:
        inputs: dict[str, Any] = batch.inputs
        return loss_in_head(self.engine, batch.label_BS, config, target, batch.trained, batch.shifted, **inputs)

    def _of_whole_logits(self, batch: MicroBatch, config: DistillationConfig | None) -> tuple[DistillationLoss, Any]:
        label_BS, trained, shifted = batch.label_BS, batch.trained, batch.shifted
        if self.teacher is None or config is None:
            output = self._run(batch)
            total = task_loss(with_position_axis(output.logits), label_BS, trained=trained, shifted=shifted)
            nothing = torch.zeros_like(total)
            return DistillationLoss(total, total.detach(), nothing, nothing), output
        with self.teacher.captured() as states:
            teacher_BSV = self.teacher(**batch.inputs)
        next_T, of_logits = next_labels(label_BS, shifted), replace(config, hidden=None)
        with compare_hidden(self.engine.module, states, next_T, config, trained) as hidden_loss:
            output = self._run(batch)
        logits = with_position_axis(output.logits), with_position_axis(teacher_BSV)
        losses = distillation_loss(*logits, label_BS, of_logits, trained, shifted)
        return hidden_loss.add_to(losses), output

    def _run(self, batch: MicroBatch) -> Any:
        return self.engine(use_cache=False, **batch.inputs)

    def _balance_loss(self, output: Any) -> Tensor | None:
        """What a mixture adds so that its experts are used evenly, where its config.json asks for that."""
        balance: Tensor | None = getattr(output, "aux_loss", None)
        if balance is None:
            return None
        # transformers' own mixtures give it bare, and multiply only in the loss that they make themselves.
        model = self.engine.module
        if model.config.model_type in OWN_FAMILIES:
            return balance
        of_text = model.config.get_text_config()
        places = ((model, "router_aux_loss_coef"), (model, "aux_loss_coef"), (of_text, "router_aux_loss_coef"))
        factor = next((getattr(holder, key) for holder, key in places if hasattr(holder, key)), None)
        return None if factor is None else balance * factor
