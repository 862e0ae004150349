"""Whether the importance that is asked for can be measured in a model: known from its config, before any weight is.

A few tokens are sent through the model on the meta device, which takes no memory and a moment, to see which layers they
pass. A layer whose weight the model takes by itself (Mamba's `dt_proj`), or that no text reaches (a vision tower), gets
no importance, which a run would find out hours later.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import PrunableWeight, full_shape, prunable_weights
from sparseforge_ds.model.measurable import refuse_unmeasurable
from sparseforge_ds.model.rules import matches, model_type_of
from sparseforge_ds.model.uncovered import name_pattern
from sparseforge_ds.planning.live import Live

_LINEAR = (nn.Linear, Conv1D)


def weights_to_prune(model: nn.Module, config: SparseForgeConfig) -> list[PrunableWeight]:
    """`prunable_weights`, all of which the importance can be measured for.

    Args:
        model: without weights, from `planning.architecture.bare_model`, so that a forward pass of it looks at no
            numbers. Of one that cannot be run all the same, no layer is refused.
        config: the `sparseforge` block.

    Raises:
        ValueError: as `prunable_weights`; or some weight cannot be measured, with what to paste into the block.
    """
    weights = prunable_weights(model, config)
    refuse_unmeasurable(model, weights, config)
    _refuse_unpassed(model, weights, config)
    return weights


def _refuse_unpassed(model: nn.Module, weights: list[PrunableWeight], config: SparseForgeConfig) -> None:
    by_gradient = config.importance in ("fisher", "gauss_newton", "hutchinson")
    if config.importance == "magnitude" or (by_gradient and not config.curvature.per_token):
        return
    layers = [w.name for w in weights if not w.experts and isinstance(model.get_submodule(w.module), _LINEAR)]
    calls = _calls(model, layers)

    def excluding(names: list[str]) -> str:
        patterns = _patterns(names, {weight.name for weight in weights} - set(names))
        return f'paste "exclude": {json.dumps([*config.exclude, *patterns])} into the sparseforge block'

    other = '"curvature": {"per_token": false}' if by_gradient else 'importance "magnitude"'
    kind = model_type_of(model)
    if missed := [name for name, count in calls.items() if count == 0]:
        raise ValueError(
            f'importance "{config.importance}" is measured where tokens pass a layer, and {missed[0]} ({len(missed)} '
            f"of {len(weights)} weights to prune) has none that they pass: a {kind} model uses it in another way, or "
            f"not for text; {excluding(missed)}, or use {other}"
        )
    of_several = _shared(model)
    if shared := [name for name in layers if name in of_several]:
        raise ValueError(
            f'importance "{config.importance}" is measured where tokens pass a layer, and {shared[0]} ({len(shared)} '
            f"of {len(weights)} weights to prune) is the weight of several layers of this {kind} model, of which one "
            f"would be measured; {excluding(shared)}, or use {other}"
        )
    twice = [name for name, count in calls.items() if count > 1]
    if twice and config.importance == "hutchinson":
        raise ValueError(
            f'importance "hutchinson" displaces outputs of layers that are called once, and that of {twice[0]} '
            f"({len(twice)} in all) is called {calls[twice[0]]} times in a forward pass; {excluding(twice)}, or use "
            'importance "fisher"'
        )


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
        with torch.no_grad(), Live():
            model(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"), use_cache=False)
    except (RuntimeError, AttributeError, LookupError, TypeError):
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _shared(model: nn.Module) -> set[str]:
    """Names of the weights that several modules hold, each for its own calls."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {name for name, parameter in model.named_parameters() if holders[id(parameter)] > 1}


def _patterns(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Globs that match the names and none of the others."""
    found: dict[str, None] = {}
    for name in names:
        pattern = name_pattern(name)
        found.setdefault(name if any(matches(other, (pattern,)) for other in others) else pattern)
    return list(found)
