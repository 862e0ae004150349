"""Check that the chosen importance can be measured in a model, before any weight is loaded.

A few tokens pass the model on the meta device, to see which layers they reach. No importance can be measured for a
layer whose weight the model uses without calling it (Mamba's `dt_proj`), or that no text reaches (a vision tower).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.architecture import without_numbers
from sparseforge_ds.model.families import PrunableWeight, full_shape
from sparseforge_ds.model.measurable import refuse_unmeasurable
from sparseforge_ds.model.peak_memory import PeakMemoryCounter
from sparseforge_ds.model.rules import matches, model_type_of, name_pattern


def check_measurable(model: nn.Module, weights: Sequence[PrunableWeight], config: SparseForgeConfig) -> None:
    """Check that the importance of all weights can be measured.

    Args:
        model: of `model.architecture.bare_model`. If it cannot run on the meta device, no layer is rejected.
        weights: its `prunable_weights`.
        config: its importance and curvature are used.

    Raises:
        ValueError: a weight cannot be measured; the message has the setting that leaves it out.
    """
    refuse_unmeasurable(model, weights, config)
    by_weights = config.importance == "hutchinson" and not config.curvature.per_token
    if config.importance == "magnitude" or by_weights:
        return
    linear = (nn.Linear, Conv1D)
    layers = [w.name for w in weights if not w.experts and isinstance(model.get_submodule(w.module), linear)]
    calls = _calls(model, layers)
    other = '"curvature": {"per_token": false}' if config.importance == "hutchinson" else 'importance "magnitude"'
    model_type = model_type_of(model)

    def refuse(names: list[str], cause: str, other: str = other) -> None:
        """Raise the error about these weights, with the globs that exclude them."""
        patterns = _patterns(names, {weight.name for weight in weights} - set(names))
        exclude = json.dumps([*config.exclude, *patterns])
        raise ValueError(
            f'importance "{config.importance}" {cause}; paste "exclude": {exclude} into the sparseforge block, or use '
            f"{other}"
        )

    def first_of(names: list[str]) -> str:
        count = f"({len(names)} of {len(weights)} weights to prune)"
        return f"is measured where tokens pass a layer, and {names[0]} {count}"

    # Layers that no token passes.
    if missed := [name for name, count in calls.items() if count == 0]:
        cause = f"has none that they pass: a {model_type} model uses it in another way, or not for text"
        refuse(missed, f"{first_of(missed)} {cause}")
    # Weights of several layers.
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    if shared := [name for name in layers if holders[id(model.get_parameter(name))] > 1]:
        cause = f"is the weight of several layers of this {model_type} model, of which one would be measured"
        refuse(shared, f"{first_of(shared)} {cause}")
    # Layers whose outputs cannot be displaced one by one.
    repeated = [name for name, count in calls.items() if count > 1]
    if repeated and config.importance == "hutchinson":
        first = f"{repeated[0]} ({len(repeated)} in all) is called {calls[repeated[0]]} times in a forward pass"
        refuse(
            repeated, f"displaces outputs of layers that are called once, and that of {first}", 'importance "fisher"'
        )


def _calls(model: Any, names: Iterable[str]) -> dict[str, int]:
    """Count how often tokens pass the layer of each weight; empty for a model that cannot run on the meta device."""
    calls = dict.fromkeys(names, 0)

    def count_call(name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = (*args, *kwargs.values())
        widths = full_shape(layer.weight)[:: 1 if isinstance(layer, Conv1D) else -1]
        has_tensors = isinstance(output, Tensor) and bool(inputs) and isinstance(inputs[0], Tensor)
        calls[name] += has_tensors and (inputs[0].shape[-1], output.shape[-1]) == widths

    # One hook a layer, which counts calls whose widths are those of its weight.
    with ExitStack() as stack:
        for name in calls:
            layer = model.get_submodule(name.rpartition(".")[0])
            stack.enter_context(layer.register_forward_hook(partial(count_call, name), with_kwargs=True))
        # One forward pass of 8 tokens on the meta device, where nothing is computed.
        try:
            with without_numbers(model.config), torch.no_grad(), PeakMemoryCounter():
                model(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"), use_cache=False)
        except ValueError:
            return {}
    return calls


def _patterns(names: Iterable[str], other_names: Collection[str]) -> list[str]:
    """Return globs that match the names and none of `other_names`."""
    globs: dict[str, None] = {}
    for name in names:
        pattern = name_pattern(name)
        globs.setdefault(name if any(matches(other_name, (pattern,)) for other_name in other_names) else pattern)
    return list(globs)
