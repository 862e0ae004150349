"""Saved names of a family's weights: one tensor an expert, while transformers keeps all experts in one in memory.

`save_pretrained` of transformers writes these names, and other loaders read them. A saved tensor is a run
of consecutive elements of one tensor of the model, so it can be read from a checkpoint by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparseforge_ds.model.families import FAMILIES


@dataclass(frozen=True)
class SavedTensor:
    """Place of a saved tensor in the model."""

    memory_name: str
    """Name of the model's tensor in memory that it is a part of."""
    start: int
    """Index of its first element in that tensor, flat."""
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Index behind its last element."""
        return self.start + math.prod(self.shape)


def saved_tensors(model_type: object, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, SavedTensor]:
    """Return the saved tensors of a model by name, in the model's order.

    Args:
        model_type: key of the family table; in another family, names and tensors are those of the model.
        shapes: of the model's tensors.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    tensors: dict[str, SavedTensor] = {}
    for name, shape in shapes.items():
        row = next((row for row in family.saved_as if f".{name}".endswith(f".{row.name}")), None) if family else None
        if row is None:
            tensors[name] = SavedTensor(name, 0, tuple(shape))
            continue
        prefix = name.removesuffix(row.name)
        if "*" not in row.parts[0]:
            tensors[prefix + row.parts[0]] = SavedTensor(name, 0, tuple(shape))
            continue
        # The parts of an expert lie end to end, and the experts one behind the other.
        experts, rows, columns = shape
        start = 0
        for expert in range(experts):
            for part in row.parts:
                tensor = SavedTensor(name, start, (rows // len(row.parts), columns))
                tensors[prefix + part.replace("*", str(expert))] = tensor
                start = tensor.stop
    return tensors


def names_in_files(
    model_type: object, shapes: Mapping[str, tuple[int, ...]], base_prefix: str
) -> dict[str, SavedTensor]:
    """Return the tensors of a model by every name that files have for them.

    Files may use saved names, the model's own, or those without the prefix of the base model.

    Args:
        model_type: as of `saved_tensors`.
        shapes: of the model's tensors.
        base_prefix: `base_model_prefix` of the model.
    """
    tensors = {
        **saved_tensors(model_type, shapes),
        **{name: SavedTensor(name, 0, shape) for name, shape in shapes.items()},
    }
    inner = f"{base_prefix}."
    return tensors | {name.removeprefix(inner): part for name, part in tensors.items() if name.startswith(inner)}
