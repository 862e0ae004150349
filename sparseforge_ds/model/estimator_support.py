"""Whether the importance that is asked for can be measured in a model: known from its config, before any weight is.

A few tokens are sent through the model on the meta device, to see which layers they pass. A layer whose weight the
model takes by itself (Mamba's `dt_proj`), or that no text reaches (a vision tower), gets no importance.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.architecture import without_numbers
from sparseforge_ds.model.families import PrunableWeight, full_shape, prunable_weights
from sparseforge_ds.model.measurable import refuse_unmeasurable
from sparseforge_ds.model.peak_memory import PeakMemoryCounter
from sparseforge_ds.model.rules import matches, model_type_of, name_pattern


def weights_to_prune(model: nn.Module, config: SparseForgeConfig) -> list[PrunableWeight]:
    """`prunable_weights`, all of which the importance can be measured for.

    Raises as `prunable_weights`, and where some weight cannot be measured, with what to paste into the block. The model
    is of `model.architecture.bare_model`; where it cannot be run without numbers, no layer is refused.
    """
    weights = prunable_weights(model, config)
    refuse_unmeasurable(model, weights, config)
    by_gradient = config.importance in ("fisher", "hutchinson")
    if config.importance == "magnitude" or (by_gradient and not config.curvature.per_token):
        return weights
    linear = (nn.Linear, Conv1D)
    layers = [w.name for w in weights if not w.experts and isinstance(model.get_submodule(w.module), linear)]
    calls = _calls(model, layers)
    other = '"curvature": {"per_token": false}' if by_gradient else 'importance "magnitude"'
    kind = model_type_of(model)

    def refuse(names: list[str], why: str, other: str = other) -> None:
        patterns = _patterns(names, {weight.name for weight in weights} - set(names))
        exclude = json.dumps([*config.exclude, *patterns])
        raise ValueError(
            f'importance "{config.importance}" {why}; paste "exclude": {exclude} into the sparseforge block, or use '
            f"{other}"
        )

    def some(names: list[str]) -> str:
        of_all = f"({len(names)} of {len(weights)} weights to prune)"
        return f"is measured where tokens pass a layer, and {names[0]} {of_all}"

    if missed := [name for name, count in calls.items() if count == 0]:
        elsewhere = f"has none that they pass: a {kind} model uses it in another way, or not for text"
        refuse(missed, f"{some(missed)} {elsewhere}")
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    if shared := [name for name in layers if holders[id(model.get_parameter(name))] > 1]:
        of_one = f"is the weight of several layers of this {kind} model, of which one would be measured"
        refuse(shared, f"{some(shared)} {of_one}")
    twice = [name for name, count in calls.items() if count > 1]
    if twice and config.importance == "hutchinson":
        often = f"{twice[0]} ({len(twice)} in all) is called {calls[twice[0]]} times in a forward pass"
        why = f"displaces outputs of layers that are called once, and that of {often}"
        refuse(twice, why, 'importance "fisher"')
    return weights


def _calls(model: Any, names: Iterable[str]) -> dict[str, int]:
    """How often tokens pass the layer of each weight; {} for a model that cannot be run without numbers."""
    calls = dict.fromkeys(names, 0)

    def called(name: str, given: tuple[Any, ...], output: Any) -> None:
        layer = model.get_submodule(name.rpartition(".")[0])
        inputs, outputs = full_shape(layer.weight)[:: 1 if isinstance(layer, Conv1D) else -1]
        tensors = isinstance(output, Tensor) and bool(given) and isinstance(given[0], Tensor)
        calls[name] += tensors and (given[0].shape[-1], output.shape[-1]) == (inputs, outputs)

    handles = [
        model.get_submodule(name.rpartition(".")[0]).register_forward_hook(
            lambda _layer, args, kwargs, output, name=name: called(name, (*args, *kwargs.values()), output),
            with_kwargs=True,
        )
        for name in calls
    ]
    try:
        with without_numbers(model.config), torch.no_grad(), PeakMemoryCounter():
            model(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"), use_cache=False)
    except ValueError:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _patterns(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Globs that match the names and none of the others."""
    found: dict[str, None] = {}
    for name in names:
        pattern = name_pattern(name)
        found.setdefault(name if any(matches(other, (pattern,)) for other in others) else pattern)
    return list(found)
