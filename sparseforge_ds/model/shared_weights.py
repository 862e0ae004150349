"""Rejection of weights that several modules share: a branch or a measurement at one module misses the others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sparseforge_ds.model.families import PrunableWeight


def refuse_shared(model: nn.Module, weights: Iterable[PrunableWeight], action: str, cure: str) -> None:
    """Reject a weight that several modules share.

    Args:
        model: of transformers.
        weights: to check.
        action: for the message, such as "be measured": what only one of the modules would do.
        cure: for the message, the setting of the block that does without it.

    Raises:
        ValueError: a weight is shared.
    """
    names_of: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names_of.setdefault(id(parameter), []).append(f"{module_name}.{name}")
    for weight in weights:
        if len(names := names_of[id(model.get_parameter(weight.name))]) > 1:
            raise ValueError(
                f"{' and '.join(names)} are one weight, and one of the layers alone would {action}; set {cure}, or "
                f'keep it dense with "exclude": ["{names[0]}"] in the sparseforge block'
            )
