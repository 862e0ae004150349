"""Where the experts of a mixture are, and what lists of them need: a rank calls only those that it has tokens for.

DeepSpeed's ZeRO-1 and ZeRO-2 add up gradients by their place in a bucket, in the order in which they come: ranks that
call different experts would add those of different weights. So every expert gets a gradient, zero where it was not
called, when a backward leaves their block. Under ZeRO-3 the block is a leaf module, for which DeepSpeed does that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparseforge_ds.model.family_table import FAMILIES
from sparseforge_ds.model.rules import fits_row, model_type_of

_JOINS = "joins_expert_gradients"


def leaf_modules(model: nn.Module) -> list[str]:
    """Names of the modules that ZeRO-3 must gather as one, its leaves.

    Which experts run differs between ranks. DeepSpeed gathers parameters as their modules are called, so ranks that
    call different ones wait for each other forever, or mix up their tensors. Empty for dense models. In a family that
    the table does not have, whatever is called `experts`.
    """
    lists = expert_lists(model)
    return [lists.get(name, name) for name in _expert_modules(model)]


def expert_lists(model: nn.Module) -> dict[str, str]:
    """Names of the lists of experts, and of the blocks around them, which are what is called."""
    found = _expert_modules(model)
    return {name: name.rpartition(".")[0] for name, module in found.items() if isinstance(module, nn.ModuleList)}


def _expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    model_type = model_type_of(model)
    globs = FAMILIES[model_type].experts if model_type in FAMILIES else ("experts",)
    return {name: module for name, module in model.named_modules() if any(fits_row(name, glob) for glob in globs)}


class _SyncExpertGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        # One element each, until it is added to a gradient.
        return grad, *(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)


def sync_expert_gradients(model: nn.Module, lists: dict[str, str]) -> None:
    """Let all experts of a list have gradients at the same moment of a backward pass, called or not. Before
    `deepspeed.initialize`; nothing is done for parameters that ZeRO-3 partitions. `lists` as of `expert_lists`."""
    for name, block in lists.items():
        experts = [*model.get_submodule(name).parameters()]

        def joined(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], experts: list[nn.Parameter] = experts
        ) -> Any:
            trained = [
                parameter for parameter in experts if parameter.requires_grad and not hasattr(parameter, "ds_id")
            ]
            if not trained or not torch.is_grad_enabled():
                return None
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            hidden = (key for key, value in given.items() if isinstance(value, Tensor) and value.is_floating_point())
            key = next(hidden, None)
            if key is None:
                raise ValueError(f"{type(module).__name__}, which holds experts, is called without hidden states")
            given[key] = _SyncExpertGradients.apply(given[key], *trained)  # type: ignore[no-untyped-call]
            return tuple(given[index] for index in range(len(args))), {word: given[word] for word in kwargs}

        model.get_submodule(block).register_forward_pre_hook(joined, with_kwargs=True)
        setattr(model.get_submodule(block), _JOINS, True)


def refuse_unprepared(model: nn.Module, lists: dict[str, str]) -> None:
    """Refuse a model whose gradients would be mixed up, since `sync_expert_gradients` was not called for one of the lists."""
    for name, block in lists.items():
        if not hasattr(model.get_submodule(block), _JOINS):
            raise ValueError(
                f"{name}: ranks that call different experts would add up the gradients of different weights; "
                "call model = sparseforge_ds.prepare(model, config) before deepspeed.initialize"
            )
