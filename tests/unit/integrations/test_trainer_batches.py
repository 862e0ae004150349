"""Examples of a trainer's set for its start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from sparseforge_ds.integrations.trainer_batches import endless_examples, trained_tokens, trainer_micro_batch
from tests.tiny_models import tiny_llama


class WithLength(IterableDataset[int]):
    """A set that torch cannot index, although it has a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def test_labels_are_counted_of_batches_without_token_ids() -> None:
    """Embeddings or pictures stand in their place; only a teacher or a probe needs the ids."""
    model = tiny_llama()
    inputs = {"inputs_embeds": torch.zeros(1, 4, 32), "labels": torch.tensor([[1, -100, 2, 3]])}
    assert trained_tokens(inputs, model) == 2
    with pytest.raises(ValueError, match="the batches have no input_ids, but inputs_embeds, labels: neither a teacher"):
        trainer_micro_batch(inputs, None, model)


@pytest.mark.parametrize("dataset", [[0, 1, 2], WithLength(), datasets.Dataset.from_dict({"a": [0, 1, 2]})])
def test_sets_are_read_again_and_again(dataset: object) -> None:
    examples = [value["a"] if isinstance(value, dict) else value for value in islice(endless_examples(dataset), 7)]
    assert examples == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("dataset", [[], iter([0])])
def test_a_set_without_examples_is_no_endless_loop(dataset: object) -> None:
    with pytest.raises(ValueError, match="train_dataset: a start reads it from its beginning, and it gives no example"):
        list(islice(endless_examples(dataset), 2))
