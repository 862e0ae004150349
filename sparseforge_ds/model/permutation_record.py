"""A permutation as it is kept beside what it was applied to.

FOLDER/permutation/ has `permutation.json` (what was asked for and gained, a sha256) and `permutation.safetensors`. It
is a folder of its own so that no loader takes it for weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparseforge_ds.checkpoint.disk import atomic_folder, write_json
from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.checkpoint.tensors import TensorFolder, tensor_bytes

FOLDER = "permutation"
FORMAT = 1
_STEM = "permutation"


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

    def save(self, parent: Path) -> None:
        """Write `parent`/permutation; what was there is replaced when the new one is complete."""
        tensors = {name: index_BC.to(torch.int32).contiguous() for name, index_BC in self.index_BC.items()}
        content = {"format": FORMAT, "dimensions": self.which, "sha256": self.sha256, **self.facts}
        with atomic_folder(parent / FOLDER, replace=True) as folder:
            save_file(tensors, folder / f"{_STEM}.safetensors")
            write_json(folder / f"{_STEM}.json", content)

    @classmethod
    def load(cls, parent: Path) -> Permutation | None:
        """Of a folder that may have one."""
        folder = parent / FOLDER
        if not folder.is_dir():
            return None
        facts = read_json(folder / f"{_STEM}.json")
        tensors = TensorFolder(folder, _STEM)
        index = {name: tensors.read(name).long() for name in tensors.specs}
        format, which, sha256 = (facts.pop(key, None) for key in ("format", "dimensions", "sha256"))
        try:
            found = cls(str(which), index, facts)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        if format != FORMAT or found.sha256 != sha256:
            raise ValueError(f"{folder}: is damaged or of another version (format, or sha256); permute again")
        return found
