"""The names under which a family's weights are published: one tensor an expert, where transformers keeps all in one.

They are what `save_pretrained` of transformers writes, and what other loaders read. A tensor of a published file is a
run of consecutive elements of one tensor of the model, so that it can be read from a checkpoint by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparseforge_ds.model.families import FAMILIES


@dataclass(frozen=True)
class PublishedTensor:
    """Where a published tensor is in the model."""

    of: str
    """Name of the model's tensor."""
    start: int
    """First of its elements in that tensor, flat."""
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past the last of its elements."""
        return self.start + math.prod(self.shape)


def published_tensors(model_type: object, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, PublishedTensor]:
    """The published tensors of a model by name, in its order; those of an unknown family are what they are."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    found: dict[str, PublishedTensor] = {}
    for name, shape in shapes.items():
        row = next((row for row in family.published if f".{name}".endswith(f".{row.name}")), None) if family else None
        before, parts = (name, ("",)) if row is None else (name.removesuffix(row.name), row.parts)
        if "*" not in parts[0]:
            found[before + parts[0]] = PublishedTensor(name, 0, tuple(shape))
            continue
        experts, rows, columns = shape
        start = 0
        for expert in range(experts):
            for part in parts:
                tensor = PublishedTensor(name, start, (rows // len(parts), columns))
                found[before + part.replace("*", str(expert))] = tensor
                start = tensor.stop
    return found
