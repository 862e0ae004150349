"""Micro-batches that probes of the curvature read under a trainer: those of its step, every trained token alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.data.micro_batch import IGNORED, MicroBatch
from sparseforge_ds.model.distill import next_labels
from sparseforge_ds.model.task_head import TaskHead, task_head
from sparseforge_ds.train.objective import Objective
from sparseforge_ds.zero.probe import Closure

_NOT_MORE = ("input_ids", "labels", "shift_labels", "use_cache")
"""Inputs that are not `MicroBatch.more`."""
_WITH_COMPLETIONS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "pixel_values")
"""Inputs of the forward pass among those of TRL's trainers, which also hold rewards, log-probabilities and the like."""


def micro_batch_of(inputs: dict[str, Any], trained: float | None, model: Any) -> MicroBatch:
    """Return a trainer's inputs as a micro-batch, whose labels stand where the model's own loss takes them to be.

    Args:
        inputs: with `shift_labels` where ranks share sequences.
        trained: see `MicroBatch`.
        model: with a head that `require_task_head` knows.

    Raises:
        ValueError: there are no labels, or no classes.
    """
    shifted = "shift_labels" in inputs
    if not shifted and "labels" not in inputs:
        raise ValueError(
            f"the batches have no labels, but {', '.join(inputs)}: the trainer has a loss of its own, which neither a "
            'teacher nor a probe of the curvature can form; leave teacher and "curvature": {"source": "probe"} out, or '
            "give labels, -100 where nothing is to be learned"
        )
    more = {key: value for key, value in inputs.items() if key not in _NOT_MORE}
    labels, head = inputs["shift_labels" if shifted else "labels"], task_head(model)
    if labels.is_floating_point():
        raise ValueError(
            f"the labels are {labels.dtype}, numbers and not classes: {type(model).__name__} has another loss than the "
            "cross-entropy that a teacher or a probe of the curvature takes; leave them out"
        )
    if head is TaskHead.SEQUENCE:
        labels = labels.view(-1, 1)
    if head is TaskHead.DECODER and not {"decoder_input_ids", "decoder_inputs_embeds"} & more.keys():
        more["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
    return MicroBatch(inputs["input_ids"], labels, trained, more, shifted or head is not TaskHead.NEXT_TOKEN)


def task_batch_of(inputs: dict[str, Any], trained: float | None, model: Any) -> MicroBatch:
    """Return what the task loss of a probe reads: the labels, or the completions of a trainer of TRL.

    Raises:
        ValueError: there are neither.
    """
    return micro_batch_of(_with_labels(inputs), trained, model)


def trained_tokens(inputs: dict[str, Any], model: Any) -> Tensor | None:
    """Return () how many labels a trainer's inputs train on; None where they do not say."""
    inputs = _with_labels(inputs)
    if not {"labels", "shift_labels"} & inputs.keys() or task_head(model) is None:
        return None
    batch = micro_batch_of(inputs, None, model)
    return (next_labels(batch.label_BS, batch.shifted) != IGNORED).sum()


def _with_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """Make the tokens that a `completion_mask` of TRL names the labels, where there are no others.

    Completions that a model has written stand apart from their prompts, and `tool_mask` leaves out what tools wrote.
    """
    if {"labels", "shift_labels"} & inputs.keys() or "completion_mask" not in inputs:
        return inputs
    trained = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    labeled = {key: inputs[key] for key in ("input_ids", *_WITH_COMPLETIONS) if key in inputs}
    if "completion_ids" in inputs:
        labeled["input_ids"] = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        labeled["attention_mask"] = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        trained = torch.cat([torch.zeros_like(inputs["prompt_mask"]), trained], dim=1)
    return {**labeled, "labels": labeled["input_ids"].masked_fill(trained == 0, IGNORED)}


class StepText:
    """The micro-batches of a step; the same for every batch of a probe, since a trainer has no others at hand.

    Args:
        given: this rank's inputs, as its data loader gave them.
        prepare: puts such inputs where the model is, or completes prompts; called for a probe alone.
        objective: forms the task loss; None where nothing probes.
        prepared: the inputs that the step was trained on, where it was made already.
    """

    def __init__(
        self,
        given: Sequence[dict[str, Any]],
        prepare: Callable[[Any], dict[str, Any]],
        objective: Objective | None,
        prepared: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.given = given
        self.prepare = prepare
        self.objective = objective
        self.prepared = prepared

    @cached_property
    def inputs(self) -> Sequence[dict[str, Any]]:
        """The prepared ones."""
        return self.prepared or [self.prepare(each) for each in self.given]

    def passes(self, batch: int) -> list[Closure]:
        """Each the sum over its tokens, divided by `divisor`."""
        assert self.objective is not None
        return [partial(self.objective.cross_entropy, micro_batch) for micro_batch in self._batches(self._divisor)]

    def divisor(self, batch: int) -> float:
        """Trained tokens of the step, over its micro-batches on all ranks: the mean of these counts every token alike.
        Collective."""
        return self._divisor

    def _batches(self, trained: float | None) -> list[MicroBatch]:
        assert self.objective is not None
        return [task_batch_of(inputs, trained, self.objective.engine.module) for inputs in self.inputs]

    @cached_property
    def _divisor(self) -> float:
        labels = [next_labels(batch.label_BS, batch.shifted) for batch in self._batches(None)]
        trained = torch.stack([(label_N != IGNORED).sum() for label_N in labels]).sum()
        torch.distributed.all_reduce(trained)
        return max(1, int(trained)) / (torch.distributed.get_world_size() * len(self.inputs))


class StartText:
    """Batches that a start reads under a trainer: the first examples of its train set, in the set's own order, and over
    again where they are few. The trainer's own data loader is left alone.

    Args:
        trainer: whose set, collator and micro-batch it is.
        per_batch: micro-batches of a batch.
        objective: forms the task loss.
    """

    def __init__(self, trainer: Any, per_batch: int, objective: Objective) -> None:
        self.per_batch = per_batch
        self.objective = objective
        self._prepare = trainer._prepare_inputs
        self._collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
        self._size, self._rank = trainer.args.per_device_train_batch_size, trainer.args.process_index
        self._examples = _endless(trainer.train_dataset)
        self._ranks = trainer.args.world_size

    def passes(self, batch: int) -> list[Closure]:
        """The next micro-batches of this rank; batches are asked for one after the other."""
        return [partial(self.objective.cross_entropy, self._next()) for _ in range(self.per_batch)]

    def _next(self) -> MicroBatch:
        of_all_ranks = list(islice(self._examples, self._size * self._ranks))
        inputs = self._prepare(self._collate(of_all_ranks[self._rank * self._size :][: self._size]))
        return task_batch_of(inputs, None, self.objective.engine.module)


def _endless(dataset: Any) -> Iterator[Any]:
    """Yield the examples of a set, map-style or iterable, again and again."""
    while True:
        yield from (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else dataset
