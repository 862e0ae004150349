"""A permutation of a model's channels, and what is kept of it beside the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.checkpoint.tensors import tensor_bytes
from sparseforge_ds.model.basis import FORMAT, PERMUTATION


@dataclass(frozen=True)
class Permutation:
    """New orders of the channels of a model. Raises ValueError where one of them leaves a channel out."""

    which: str
    """The dimensions that were asked for; key of `PARTS`."""
    index_BC: Mapping[str, Tensor]
    """(blocks, channels) a dimension: for every channel the one that takes its place."""
    facts: Mapping[str, Any]
    """Plain JSON: how it was found, and what it gained."""

    def __post_init__(self) -> None:
        for name, index_BC in self.index_BC.items():
            whole = torch.arange(index_BC.shape[-1], device=index_BC.device).expand_as(index_BC)
            if index_BC.dim() != 2 or not torch.equal(index_BC.sort(-1).values, whole):
                raise ValueError(f"{name} is no order of channels; permute again")

    @property
    def sha256(self) -> str:
        """Of all orders."""
        digest = hashlib.sha256()
        for name, index_BC in sorted(self.index_BC.items()):
            digest.update(f"{name} {tuple(index_BC.shape)}\n".encode())
            digest.update(tensor_bytes(index_BC.to(torch.int32)))
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write how the order was found, and its sha256, beside the model whose channels are in it."""
        content = {"format": FORMAT, "dimensions": self.which, "sha256": self.sha256, **self.facts}
        write_json(folder / PERMUTATION, content)
