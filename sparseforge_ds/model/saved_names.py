"""Saved names of a family's weights: one tensor an expert, while transformers keeps all experts in one in memory.

`save_pretrained` of transformers writes these names, and other loaders read them. A saved tensor is a run
of consecutive elements of one tensor of the model, so it can be read from a checkpoint by itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

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


class Placement:
    """Tensors of a model's files, each at its place in the model."""

    def __init__(self, model: Any, model_type: object, stored: Mapping[str, tuple[int, ...]]) -> None:
        """Find the places.

        Args:
            model: of transformers, on any device.
            model_type: as of `saved_tensors`.
            stored: shapes of the tensors, by their names in the files.
        """
        self.shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        """Shapes of the model's tensors."""
        self._ties: dict[str, str] = model.all_tied_weights_keys
        # Files may use saved names, the model's own, those without the prefix of the base model, or older ones.
        places = saved_tensors(model_type, self.shapes)
        places |= {name: SavedTensor(name, 0, shape) for name, shape in self.shapes.items()}
        inner = f"{model.base_model_prefix}."
        places |= {name.removeprefix(inner): place for name, place in places.items() if name.startswith(inner)}
        if others := [name for name in stored if name not in places]:
            places |= self._renamed(model, others)
        self.places = {name: places[name] for name in stored if name in places}
        """Place of each tensor that has one, by its name in the files."""
        misfits = [name for name, place in self.places.items() if stored[name] != place.shape]
        self.misfit = _describe_misfit(misfits[0], stored, self.places) if misfits else None
        """Sentence about the first tensor that has another shape than its place; None if all fit."""

    def _renamed(self, model: Any, names: Collection[str]) -> dict[str, SavedTensor]:
        """Return the places of tensors that transformers renames on load, as in vision-language models."""
        from sparseforge_ds.model.loading_targets import Targets
        from sparseforge_ds.transformers_internals import get_model_conversion_mapping

        targets = Targets(model, get_model_conversion_mapping(model))
        target_of = {name: targets.find(name) for name in names}
        return {
            name: SavedTensor(memory_name, 0, self.shapes[memory_name])
            for name, (memory_name, conversion) in target_of.items()
            if conversion is None and memory_name in self.shapes
        }

    def missing(self, converted: Collection[str] = ()) -> list[str]:
        """Return the names in memory of tensors that the files lack, or have a part of.

        Of tied weights one is enough.

        Args:
            converted: names in memory that are loaded from tensors without a place.
        """
        filled: dict[str, set[tuple[int, int]]] = {}
        for place in self.places.values():
            filled.setdefault(place.memory_name, set()).add((place.start, place.stop))
        complete = {
            self._ties.get(name, name)
            for name, shape in self.shapes.items()
            if name in converted or sum(stop - start for start, stop in filled.get(name, ())) >= math.prod(shape)
        }
        return [name for name in self.shapes if self._ties.get(name, name) not in complete]


def _describe_misfit(name: str, stored: Mapping[str, tuple[int, ...]], places: Mapping[str, SavedTensor]) -> str:
    return (
        f"{name} has the shape {stored[name]} in the files, and by config.json {places[name].shape}; put back the "
        "config.json that the weights were saved with"
    )
