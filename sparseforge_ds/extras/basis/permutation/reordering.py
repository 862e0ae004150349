"""Application of a permutation to the tensors of one model, one at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparseforge_ds.extras.basis.permutation.channels import Axis, dimensions
from sparseforge_ds.extras.basis.permutation.record import Permutation


class Reordering:
    """Permutation of the tensors of one model; the arguments are those of `dimensions`.

    Raises:
        ValueError: the permutation is of another model.
    """

    def __init__(
        self, permutation: Permutation, model_type: str, config: Any, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._axes: dict[str, list[tuple[Axis, Tensor]]] = defaultdict(list)
        by_name = dimensions(model_type, config, shapes, permutation.selection)
        sizes = {name: (dimension.blocks, dimension.channels) for name, dimension in by_name.items()}
        if sizes != {name: tuple(index_BC.shape) for name, index_BC in permutation.index_BC.items()}:
            raise ValueError(
                "the permutation is of another model, with other channels; use the model that it was found for"
            )
        for name, dimension in by_name.items():
            for axis in dimension.axes:
                self._axes[axis.tensor].append((axis, permutation.index_BC[name]))

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor of the model with its channels in their new order."""
        for axis, index_BC in self._axes.get(name, ()):
            value = axis.reorder(value, index_BC)
        return value
