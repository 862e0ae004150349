"""Weights that several modules of a model have: what is put beside one module, or measured there, misses the others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sparseforge_ds.model.families import PrunableWeight


def refuse_shared(model: nn.Module, weights: Iterable[PrunableWeight], what: str, cure: str) -> None:
    """Raise ValueError for a weight of several modules, of which one alone would be or have `what`; `cure` is what to
    set in the block to do without."""
    holders: dict[int, list[str]] = {}
    for module, part in model.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(f"{module}.{name}")
    for weight in weights:
        if len(names := holders[id(model.get_parameter(weight.name))]) > 1:
            raise ValueError(
                f"{' and '.join(names)} are one weight, and one of the layers alone would {what}; set {cure}, or keep "
                f'it dense with "exclude": ["{names[0]}"] in the sparseforge block'
            )
