"""Hooks on layers during a probe: inputs of linear layers, gradients of their outputs, logits, entries of blocks.

A gradient hook is an identity in the autograd graph behind a linear layer. It saves the input through the graph's own
machinery, so that activation checkpointing recomputes it like any other activation instead of keeping it alive. Its
result shares memory with the layer's output and may be changed in place, as Falcon and Llama 4 do (autograd would
refuse that for a view); the hook sees the gradient of the output before the change.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_FLEX = "flex_attention"
_eager_mode = ExitStack()
"""Eager mode of the process, while anything needs it."""
atexit.register(_eager_mode.close)  # a loop that ends by an error leaves it on, and later torch cannot switch it off
_eager_users = 0
"""Number of blocks that need it; they may end in any order."""

TokenHook = Callable[[str, Tensor, Tensor], None]
"""Function of a module's name, dL/dy (T, out) and x (T, in)."""
InputHook = Callable[[str, Tensor], None]
"""Function of a module's name and x (T, in)."""
DisplacementHook = Callable[[str, Tensor], Tensor]
"""Function of a module's name and y (T, out) that returns what is added to y."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what torch.compile has compiled in eager mode while active, since compiled code does not see new hooks.

    Without the compiler loaded, which takes seconds, nothing is compiled and nothing is done.
    """
    global _eager_users
    if "torch._dynamo" not in sys.modules:
        yield
        return
    # Whoever comes first switches it on, and whoever is left last off.
    if not _eager_users:
        _eager_mode.enter_context(_eager())
    _eager_users += 1
    try:
        yield
    finally:
        _eager_users -= 1
        if not _eager_users:
            _eager_mode.close()


@contextmanager
def _eager() -> Iterator[None]:
    """Run all but flex attention in eager mode.

    No hook looks into flex attention, and in eager mode it forms all scores of a layer.
    """
    flex = ALL_ATTENTION_FUNCTIONS[_FLEX]

    @wraps(flex)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("default"):
            return flex(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_FLEX, compiled)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(_FLEX, flex)


class _Hook(torch.autograd.Function):
    """Identity whose backward calls a hook with the gradient and saved tensors."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hook: Callable[..., None], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.hook = hook
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        with torch.no_grad():
            ctx.hook(grad, *saved)
        return grad, None, *(None for _ in saved)


def with_hook(output: Tensor, hook: Callable[..., None], *saved: Tensor) -> Tensor:
    """Return `output` with a backward that calls hook(gradient, *saved), even if nothing before it has a gradient."""
    if not output.requires_grad:
        output = output.detach().requires_grad_()
    return _Hook.apply(output, hook, *saved)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def token_gradients(
    modules: dict[str, Module], hook: TokenHook, displacement: DisplacementHook | None = None
) -> Iterator[None]:
    """Call hook(name, dL/dy (T, out), x (T, in)) in every backward through a module while active.

    With a `displacement`, every module returns y + displacement(name, y (T, out)). It must be the same when activation
    checkpointing computes a layer again.
    """

    def on_forward(name: str, inputs: Tensor, output: Tensor) -> Tensor:
        if displacement is not None:
            output = output + displacement(name, _rows(output.detach())).view_as(output)
        # The first pass of re-entrant checkpointing records no graph.
        if not torch.is_grad_enabled():
            return output
        return with_hook(output, lambda grad, inputs: hook(name, _rows(grad), _rows(inputs)), inputs.detach())

    # A hook behind DeepSpeed's own hooks would recompute a checkpointed layer before ZeRO-3 fetches the module for its
    # backward: an order unlike training's, and the prefetch trace would be thrown away at every probe.
    with _forward_hooks(modules, on_forward, first=True):
        yield


@contextmanager
def block_entries(modules: dict[str, Module], enter: Callable[[str, int], None]) -> Iterator[None]:
    """Call enter(name, T) at every forward of a module while active.

    The first floating-point tensor among a module's arguments is its hidden states, (..., hidden), of T tokens.

    Raises:
        ValueError: (in the forward) a module is called without such a tensor.
    """

    def before_forward(module: Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = (*args, *kwargs.values())
        hidden = next((value for value in arguments if isinstance(value, Tensor) and value.is_floating_point()), None)
        if hidden is None:
            raise ValueError(f"{name}: {type(module).__name__} is called without a tensor of hidden states")
        enter(name, hidden.shape[:-1].numel())

    # Some families pass hidden states by keyword.
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: before_forward(module, name, args, kwargs), with_kwargs=True
        )
        for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def layer_inputs(modules: dict[str, Module], hook: InputHook) -> Iterator[None]:
    """Call hook(name, x (T, in)) at every forward of a module while active."""

    def on_forward(name: str, inputs: Tensor, _output: Tensor) -> None:
        hook(name, _rows(inputs.detach()))

    with _forward_hooks(modules, on_forward):
        yield


def _rows(values: Tensor) -> Tensor:
    """Return (..., n) values as (T, n), one row a token."""
    return values.reshape(-1, values.shape[-1])


@contextmanager
def _forward_hooks(
    modules: dict[str, Module], hook: Callable[[str, Tensor, Tensor], Any], first: bool = False
) -> Iterator[None]:
    """Call hook(name, input, output) after every forward while active, in eager mode; its result replaces the output.

    With `first` it is called before the hooks that the modules have, such as DeepSpeed's. Without modules nothing
    changes.
    """
    if not modules:
        yield
        return
    handles = [
        module.register_forward_hook(
            lambda _module, args, kwargs, output, name=name: hook(name, (*args, *kwargs.values())[0], output),
            prepend=first,
            with_kwargs=True,
        )
        for name, module in modules.items()
    ]
    try:
        with uncompiled():
            yield
    finally:
        for handle in handles:
            handle.remove()
