"""The tensors of an exported folder in their dense shapes, whatever the storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec
from sparseforge_ds.export.packed24 import is_packed, logical_specs, read_packed


class StoredWeights:
    """A Hugging Face folder of ordinary safetensors, or a packed24 one. Several threads may read.

    Raises:
        ValueError: it is damaged.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._tensors = TensorFolder(folder)
        self.packed = is_packed(config)
        self.specs = logical_specs(self._tensors) if self.packed else self._tensors.specs
        """Shape and dtype of every weight, as the network sees it."""

    def read(self, name: str) -> Tensor:
        """One weight in its dense shape, in memory of its own."""
        return read_packed(self._tensors, name) if self.packed else self._tensors.read(name)

    def stream(self, name: str, elements: int) -> Iterator[Tensor]:
        """One weight as runs of `elements`, (n,) each: a run is used up when the next one comes."""
        if self.packed:
            yield from self.read(name).reshape(-1).split(elements)
        else:
            yield from self._tensors.stream(name, elements)


def reads_as(spec: TensorSpec, entry: dict[str, Any]) -> bool:
    """Whether a tensor has the shape and dtype of its entry in `sparsity.json`: other ones give the same bytes."""
    dtype = str(spec.dtype).removeprefix("torch.")
    return entry.get("shape", list(spec.shape)) == list(spec.shape) and entry.get("dtype", dtype) == dtype
