"""What a checkpoint says of one weight and of one param group, apart from the elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

Number = int | float


@dataclass(frozen=True)
class StoredTensor:
    """One weight, or one persistent buffer of the module."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of what is stored: of the master, or of the module's own tensor where there is no master."""
    trained_dtype: torch.dtype
    """What the network computed with."""
    states: dict[str, torch.dtype] = field(default_factory=dict)
    """Per-element optimizer states."""
    scalars: dict[str, Number] = field(default_factory=dict)
    """Optimizer states that are one number, such as `step`: a float where the optimizer keeps a tensor, else an int."""
    others: tuple[str, ...] = ()
    """Optimizer states that are neither, which cannot be cut into shards."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """One param group of the optimizer."""

    names: tuple[str, ...]
    """Its weights. At stage 0 none where the client state has no names."""
    settings: dict[str, Any]
    """Hyperparameters and other keys of the group, without the parameters."""
