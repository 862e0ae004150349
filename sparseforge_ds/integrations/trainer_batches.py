"""Micro-batches of a trainer's step as probes of the curvature read them: all trained tokens weigh alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer

from sparseforge_ds.config import BlockStartConfig
from sparseforge_ds.data.micro_batch import IGNORED, MicroBatch
from sparseforge_ds.model.distill import next_labels
from sparseforge_ds.model.task_head import TaskHead, task_head
from sparseforge_ds.train.launcher import rank_from_launcher
from sparseforge_ds.train.objective import Objective
from sparseforge_ds.zero.extra_passes import Closure

_LOG = logging.getLogger(__name__)
_MOST_EMPTY_STEPS = 4
"""Steps without a label at the beginning of a run, after which it ends."""

_NOT_EXTRA = ("input_ids", "labels", "shift_labels", "use_cache")
"""Inputs that have a field of their own in `MicroBatch`, or none; the rest is `MicroBatch.extra_inputs`."""
_WITH_COMPLETIONS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "pixel_values")
"""Inputs of the forward pass among those of TRL's trainers, which also hold rewards, log-probabilities and the like."""


def trainer_micro_batch(inputs: dict[str, Any], trained: float | None, model: Any) -> MicroBatch:
    """Return a trainer's inputs as a micro-batch, with labels at the positions that the model's own loss expects.

    Args:
        inputs: inputs of the model; with `shift_labels` where ranks share sequences.
        trained: see `MicroBatch`.
        model: a model with a head that `require_task_head` knows.

    Raises:
        ValueError: there are no labels, or they are no classes.
    """
    # The labels.
    if not {"labels", "shift_labels"} & inputs.keys():
        raise ValueError(
            f"the batches have no labels, but {', '.join(inputs)}: the trainer has a loss of its own, which neither a "
            'teacher nor a probe of the curvature can form; leave teacher and "curvature": {"source": "probe"} out, or '
            "give labels, -100 where nothing is to be learned"
        )
    if "input_ids" not in inputs:
        raise ValueError(
            f"the batches have no input_ids, but {', '.join(inputs)}: neither a teacher nor a probe of the curvature "
            'reads them; leave teacher and "curvature": {"source": "probe"} out'
        )
    head = task_head(model)
    labels, shifted = _labels_of(inputs, head, model)

    # Other inputs by the kind of head.
    extra_inputs = {key: value for key, value in inputs.items() if key not in _NOT_EXTRA}
    if head is TaskHead.DECODER and not {"decoder_input_ids", "decoder_inputs_embeds"} & extra_inputs.keys():
        extra_inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
    return MicroBatch(inputs["input_ids"], labels, trained, extra_inputs, shifted)


def _labels_of(inputs: dict[str, Any], head: TaskHead | None, model: Any) -> tuple[Tensor, bool]:
    """Return the labels of inputs that have some, and whether they stand at the positions that predict them.

    Raises:
        ValueError: they are no classes.
    """
    shifted = "shift_labels" in inputs
    labels = inputs["shift_labels" if shifted else "labels"]
    if labels.is_floating_point():
        raise ValueError(
            f"the labels are {labels.dtype}, numbers and not classes: {type(model).__name__} has another loss than the "
            "cross-entropy that a teacher or a probe of the curvature takes; leave them out"
        )
    labels = labels.view(-1, 1) if head is TaskHead.SEQUENCE else labels
    return labels, shifted or head is not TaskHead.NEXT_TOKEN


def task_micro_batch(inputs: dict[str, Any], model: Any) -> MicroBatch:
    """Return the micro-batch of a probe's task loss: with labels, or with the completions of a trainer of TRL.

    Raises:
        ValueError: the inputs have neither.
    """
    return trainer_micro_batch(_with_labels(inputs), None, model)


def trained_tokens(inputs: dict[str, Any], model: Any) -> Tensor | None:
    """Return the number of labels that a trainer's inputs train on, (), or None where the inputs do not tell."""
    inputs = _with_labels(inputs)
    head = task_head(model)
    if not {"labels", "shift_labels"} & inputs.keys() or head is None:
        return None
    return (next_labels(*_labels_of(inputs, head, model)) != IGNORED).sum()


def _with_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """Add labels to inputs that have none: the tokens under a `completion_mask` of TRL.

    Completions that a model has written come apart from their prompts. `tool_mask` leaves out the tokens of tools.
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


class LabelWatch:
    """Watch over a run's first steps, which train on nothing where answers were cut away."""

    def __init__(self) -> None:
        self._has_seen_labels = False
        self._empty_steps = 0

    def add_step(self, labels: Any) -> None:
        """Take the number of labels of the next step; until the first label is seen, this waits for the device.

        Raises:
            ValueError: none of the first `_MOST_EMPTY_STEPS` steps has a label.
        """
        if self._has_seen_labels or int(labels):
            self._has_seen_labels = True
            return
        self._empty_steps += 1
        cause = (
            "all labels are -100: look at the template of the answers, and at the length at which examples are cut "
            "(max_length)"
        )
        if self._empty_steps == _MOST_EMPTY_STEPS:
            raise ValueError(f"nothing is trained on in the first {self._empty_steps} steps, {cause}")
        if self._empty_steps == 1 and not rank_from_launcher():
            _LOG.warning("nothing is trained on in the first step, %s", cause)


class StepBatches:
    """Micro-batches of a step; the same for every batch of a probe.

    Args:
        loaded: this rank's inputs, as its data loader returned them.
        prepare: function that moves such inputs to the model's device, or completes prompts; called for a probe alone.
        objective: the task loss; None where nothing probes.
        prepared: inputs that the step was trained on, if the step is done.
    """

    repeats = True

    def __init__(
        self,
        loaded: Sequence[dict[str, Any]],
        prepare: Callable[[Any], dict[str, Any]],
        objective: Objective | None,
        prepared: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.loaded = loaded
        self.prepare = prepare
        self.objective = objective
        self.prepared = prepared

    @cached_property
    def inputs(self) -> Sequence[dict[str, Any]]:
        """Return the prepared inputs of every micro-batch."""
        return self.prepared or [self.prepare(batch_inputs) for batch_inputs in self.loaded]

    def passes(self, batch: int) -> list[Closure]:
        """Return closures that compute the loss of each micro-batch: the sum over its tokens, divided by `divisor`.

        The first of them to run communicates.
        """
        return [partial(self._loss, micro_batch) for micro_batch in self._batches]

    def divisor(self, batch: int) -> float:
        """Return the trained tokens of the step per micro-batch, over all ranks. Collective.

        With this divisor, the mean of the micro-batches' losses counts every token alike.
        """
        return self._divisor

    def _loss(self, batch: MicroBatch) -> Tensor:
        assert self.objective is not None
        return self.objective.cross_entropy(replace(batch, trained=self._divisor))

    @cached_property
    def _batches(self) -> list[MicroBatch]:
        assert self.objective is not None
        return [task_micro_batch(inputs, self.objective.engine.module) for inputs in self.inputs]

    @cached_property
    def _divisor(self) -> float:
        labels = [next_labels(batch.label_BS, batch.shifted) for batch in self._batches]
        trained = torch.stack([(label_N != IGNORED).sum() for label_N in labels]).sum()
        torch.distributed.all_reduce(trained)
        return max(1, int(trained)) / (torch.distributed.get_world_size() * len(self.inputs))


class StartBatches:
    """Batches that a start reads under a trainer: the first examples of its train set, in the set's own order.

    It begins again where the examples are few. The trainer's own data loader is left alone.

    Args:
        trainer: the trainer, of which set, collator and micro-batch are used.
        block_start: says how many sequences an Adam step of a block has; None takes those of a training step. The first
            examples say how long a sequence is.
        objective: the task loss.
    """

    def __init__(self, trainer: Any, block_start: BlockStartConfig | None, objective: Objective) -> None:
        self.objective = objective
        self._prepare = trainer._prepare_inputs
        self._collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
        self._rank = trainer.args.process_index
        self._ranks = trainer.args.world_size
        self._size = largest = trainer.args.per_device_train_batch_size
        self.per_batch = trainer.args.gradient_accumulation_steps
        self.epochs = 0
        """Passes of the start over its batches; nobody reads it without `block_start`."""
        self._batches_read = 0
        self._newest = StepBatches((), self._prepare, objective)
        """The batch that was read last."""
        self._examples = endless_examples(trainer.train_dataset)
        if block_start is None:
            return
        # Sequences are as long as those of the first micro-batch, on average over the ranks, whose sets may differ.
        first = list(islice(self._examples, largest * self._ranks))
        self._examples = chain(first, self._examples)
        inputs = self._prepare(self._collated(first, largest))
        token_BS = task_micro_batch(inputs, objective.engine.module).token_BS
        total = torch.tensor(token_BS.shape[1], device=token_BS.device)
        torch.distributed.all_reduce(total)
        length = max(1, int(total) // self._ranks)
        # Divide the sequences of an Adam step into micro-batches, none larger than a training step's.
        steps = trainer.forge.config.max_steps
        tokens = block_start.tokens_of(steps * trainer.forge.engine.train_batch_size() * length)
        self._size, self.per_batch = block_start.micro_batches(tokens, length, self._ranks, largest)
        self.epochs = block_start.passes(tokens, length, self._ranks)

    def passes(self, batch: int) -> list[Closure]:
        """Return the losses of this rank's micro-batches; `batch` must count up by one."""
        return self._at(batch).passes(batch)

    def divisor(self, batch: int) -> float:
        """Return `StepBatches.divisor` of the batch that was read last, or of the next one. Collective."""
        return self._at(batch).divisor(batch)

    def _at(self, batch: int) -> StepBatches:
        if batch == self._batches_read:
            loaded = [self._next() for _ in range(self.per_batch)]
            self._newest = StepBatches(loaded, self._prepare, self.objective)
            self._batches_read += 1
        return self._newest

    def _next(self) -> dict[str, Any]:
        return self._collated(list(islice(self._examples, self._size * self._ranks)), self._size)

    def _collated(self, examples: list[Any], size: int) -> dict[str, Any]:
        """Return the inputs of this rank's part of the examples, `size` of them."""
        inputs: dict[str, Any] = self._collate(examples[self._rank * size :][:size])
        return inputs


def is_read_once(dataset: Any) -> bool:
    """Return whether reading a set takes its examples away, as from a generator."""
    return isinstance(dataset, Iterator) and iter(dataset) is dataset


def has_plain_examples(trainer: Any) -> bool:
    """Return whether a trainer's loader collates examples of its set as they are, and the set can be read once more."""
    is_own_loader = type(trainer).get_train_dataloader is Trainer.get_train_dataloader
    can_be_read = trainer.train_dataset is not None and not is_read_once(trainer.train_dataset)
    return is_own_loader and can_be_read and trainer.get_sp_size() == 1


def endless_examples(dataset: Any) -> Iterator[Any]:
    """Yield the examples of a set, map-style or iterable, again and again.

    Raises:
        ValueError: it has none, or none a second time.
    """
    is_map = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    dataset = () if dataset is None else dataset
    while True:
        example = None
        for example in (dataset[i] for i in range(len(dataset))) if is_map else dataset:
            yield example
        if example is None:
            raise ValueError(
                "train_dataset: a start reads it from its beginning, and it gives no example; give a set that can be "
                "read more than once"
            )
