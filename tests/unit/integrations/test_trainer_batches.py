"""Examples of a trainer's set for its start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import datasets
import pytest
from torch.utils.data import IterableDataset

from sparseforge_ds.integrations.trainer_batches import endless_examples


class WithLength(IterableDataset[int]):
    """A set that torch cannot index, although it has a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [[0, 1, 2], WithLength(), datasets.Dataset.from_dict({"a": [0, 1, 2]})])
def test_sets_are_read_again_and_again(dataset: object) -> None:
    examples = [value["a"] if isinstance(value, dict) else value for value in islice(endless_examples(dataset), 7)]
    assert examples == [0, 1, 2, 0, 1, 2, 0]
