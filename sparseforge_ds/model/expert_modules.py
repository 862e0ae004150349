"""Modules that hold the routed experts of a mixture, and gradients for experts that a rank did not call.

A rank calls only the experts that it has tokens for. ZeRO-1 and ZeRO-2 put gradients into a bucket in the order in
which they come, and sum buckets over ranks: ranks that call different experts would sum gradients of different weights.
So every expert in a list gets a gradient, zero if it was not called, when a backward pass leaves their block. Under
ZeRO-3 the block is a leaf module, for which DeepSpeed does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparseforge_ds.model.family_table import FAMILIES
from sparseforge_ds.model.rules import fits_row, model_type_of

_SYNCED = "syncs_expert_gradients"
"""Attribute of a block whose experts get their gradients together."""
_CALLED_BY_PARTS = ("JetMoeMoA",)
"""Classes of modules named `experts` that are never called themselves; all ranks call their parts alike.

ZeRO-3 would never reduce the gradients of these parts if such a module were a leaf.
"""


def leaf_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that ZeRO-3 must gather as one, its leaves; none for dense models.

    DeepSpeed gathers parameters as their modules are called. Ranks that call different experts would wait for each
    other forever, or mix up their tensors. In a family without rows, modules called `experts` are the leaves.
    """
    lists = expert_lists(model)
    return [lists.get(name, name) for name in _expert_modules(model)]


def expert_lists(model: nn.Module) -> dict[str, str]:
    """Return the name of the block around each list of experts, by the name of the list.

    A list is not called itself; its block is.
    """
    modules = _expert_modules(model)
    return {name: name.rpartition(".")[0] for name, module in modules.items() if isinstance(module, nn.ModuleList)}


def _expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold all routed experts of a layer, by name."""
    model_type = model_type_of(model)
    globs = FAMILIES[model_type].experts if model_type in FAMILIES else ("experts",)
    return {
        name: module
        for name, module in model.named_modules()
        if any(fits_row(name, glob) for glob in globs) and type(module).__name__ not in _CALLED_BY_PARTS
    }


class _SyncExpertGradients(torch.autograd.Function):
    """Identity on the hidden states, with a zero gradient for every parameter."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        # An expanded zero takes one element, until it is added to a gradient.
        return grad, *(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)


def sync_expert_gradients(model: nn.Module, lists: dict[str, str]) -> None:
    """Give all experts of a list their gradients at the same moment of a backward pass, called or not.

    Call it before `deepspeed.initialize`. Parameters that ZeRO-3 partitions are left alone.

    Args:
        model: is changed in place.
        lists: the result of `expert_lists`.
    """
    for name, block in lists.items():
        experts = [*model.get_submodule(name).parameters()]

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], experts: list[nn.Parameter] = experts
        ) -> Any:
            trained = [
                parameter for parameter in experts if parameter.requires_grad and not hasattr(parameter, "ds_id")
            ]
            if not trained or not torch.is_grad_enabled():
                return None
            # The first floating-point argument is the hidden states, by position or by name.
            arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            floating = (key for key, value in arguments.items() if _is_floating(value))
            key = next(floating, None)
            if key is None:
                raise ValueError(f"{type(module).__name__}, which holds experts, is called without hidden states")
            arguments[key] = _SyncExpertGradients.apply(arguments[key], *trained)  # type: ignore[no-untyped-call]
            positional = tuple(arguments[index] for index in range(len(args)))
            return positional, {keyword: arguments[keyword] for keyword in kwargs}

        model.get_submodule(block).register_forward_pre_hook(hook, with_kwargs=True)
        setattr(model.get_submodule(block), _SYNCED, True)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def refuse_unprepared(model: nn.Module, lists: dict[str, str]) -> None:
    """Reject a model if `sync_expert_gradients` was not called for one of its lists of experts."""
    for name, block in lists.items():
        if not hasattr(model.get_submodule(block), _SYNCED):
            raise ValueError(
                f"{name}: ranks that call different experts would add up the gradients of different weights; "
                "call model = sparseforge_ds.prepare(model, config) before deepspeed.initialize"
            )
