"""Permutation of a model's channels, and its record beside the model."""

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
    """New orders of the channels of a model.

    Raises:
        ValueError: an order leaves a channel out.
    """

    selection: str
    """Dimensions that the search could move; key of `PARTS`."""
    index_BC: Mapping[str, Tensor]
    """Order of each dimension, (blocks, channels): entry c is the old number of the channel at position c."""
    facts: Mapping[str, Any]
    """Settings and gain of the search, as plain JSON."""

    def __post_init__(self) -> None:
        for name, index_BC in self.index_BC.items():
            all_channels = torch.arange(index_BC.shape[-1], device=index_BC.device).expand_as(index_BC)
            if index_BC.dim() != 2 or not torch.equal(index_BC.sort(-1).values, all_channels):
                raise ValueError(f"{name} is no order of channels; permute again")

    @property
    def sha256(self) -> str:
        """Hash of all orders."""
        digest = hashlib.sha256()
        for name, index_BC in sorted(self.index_BC.items()):
            digest.update(f"{name} {tuple(index_BC.shape)}\n".encode())
            digest.update(tensor_bytes(index_BC.to(torch.int32)))
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the settings and gain of the search, and the orders' sha256, beside the permuted model."""
        content = {"format": FORMAT, "dimensions": self.selection, "sha256": self.sha256, **self.facts}
        write_json(folder / PERMUTATION, content)
