"""What probes of the curvature read under a trainer: the micro-batches of its step, every trained token alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.data.micro_batch import IGNORED, MicroBatch
from sparseforge_ds.model.distill import next_labels
from sparseforge_ds.train.objective import Objective
from sparseforge_ds.zero.probe import Closure

_NOT_MORE = ("input_ids", "labels", "shift_labels", "use_cache")
"""Inputs that are not `MicroBatch.more`."""


def micro_batch_of(inputs: dict[str, Any], trained: float | None) -> MicroBatch:
    """A trainer's inputs; of sequences that ranks share it has labels that are shifted already.

    Raises:
        ValueError: there are no labels.
    """
    shifted = "shift_labels" in inputs
    if not shifted and "labels" not in inputs:
        raise ValueError("the loss needs labels in every batch, -100 where nothing is to be learned")
    more = {key: value for key, value in inputs.items() if key not in _NOT_MORE}
    return MicroBatch(inputs["input_ids"], inputs["shift_labels" if shifted else "labels"], trained, more, shifted)


class StepText:
    """The micro-batches of a step; the same for every batch of a probe, since a trainer has no others at hand.

    Args:
        given: this rank's inputs, as its data loader gave them.
        prepare: puts such inputs where the model is; called for a probe alone.
        objective: forms the task loss; None where nothing probes.
    """

    def __init__(
        self, given: Sequence[dict[str, Any]], prepare: Callable[[Any], dict[str, Any]], objective: Objective | None
    ) -> None:
        self.given = given
        self.prepare = prepare
        self.objective = objective

    @cached_property
    def inputs(self) -> list[dict[str, Any]]:
        """The given ones, prepared."""
        return [self.prepare(each) for each in self.given]

    def passes(self, batch: int) -> list[Closure]:
        """Each the sum over its tokens, divided by `divisor`."""
        assert self.objective is not None
        return [partial(self._loss, inputs) for inputs in self.inputs]

    def divisor(self, batch: int) -> float:
        """Trained tokens of the step, over its micro-batches on all ranks: the mean of these counts every token alike.
        Collective."""
        return self._divisor

    def predicted(self, batch: int) -> list[Tensor]:
        """(B * S,) what each position of a micro-batch is to predict, -100 where nothing is trained on."""
        return [next_labels(each.label_BS, each.shifted) for each in (micro_batch_of(i, None) for i in self.inputs)]

    @cached_property
    def _divisor(self) -> float:
        trained = torch.stack([(each != IGNORED).sum() for each in self.predicted(0)]).sum()
        torch.distributed.all_reduce(trained)
        return max(1, int(trained)) / (torch.distributed.get_world_size() * len(self.inputs))

    def _loss(self, inputs: dict[str, Any]) -> Tensor:
        assert self.objective is not None
        return self.objective.cross_entropy(micro_batch_of(inputs, self._divisor))
