"""What linear layers see and receive during a probe: their inputs, and the gradients of their outputs; and when a
backward pass is done with a block of layers.

A hook is an identity in the autograd graph behind a linear layer. It saves the input through the graph's own machinery,
so that activation checkpointing recomputes it like any other activation instead of keeping it alive. What it returns is
where the layer's output is, and may be changed in place, as Falcon and Llama 4 do (autograd would refuse that for a
view); the gradient that is seen is that of the output before the change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_FLEX = "flex_attention"

TokenHook = Callable[[str, Tensor, Tensor], None]
InputHook = Callable[[str, Tensor], None]
DisplacementHook = Callable[[str, Tensor], Tensor]


@contextmanager
def uncompiled() -> Iterator[None]:
    """While active, what torch.compile has compiled runs as it is: its code does not look for new hooks. Flex attention
    does not, for it is a compiled function that no hook looks into, and as it is it forms all scores of a layer.

    Nothing is compiled where the compiler was never loaded, which takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
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
    """`output`, whose backward calls hook(gradient, *saved), whether anything before it has a gradient or not."""
    if not output.requires_grad:
        output = output.detach().requires_grad_()
    return _Hook.apply(output, hook, *saved)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def token_gradients(
    modules: dict[str, Module], hook: TokenHook, displacement: DisplacementHook | None = None
) -> Iterator[None]:
    """While active, every backward through a module calls hook(name, dL/dy (T, out), x (T, in)).

    With a `displacement`, every module returns y + displacement(name, y (T, out)), which must be the same whenever a
    layer is computed again, as activation checkpointing does.
    """

    def hooked(name: str, given: Tensor, output: Tensor) -> Tensor:
        if displacement is not None:
            output = output + displacement(name, _rows(output.detach())).view_as(output)
        if not torch.is_grad_enabled():
            return output  # the first, recording-free pass of re-entrant checkpointing
        return with_hook(output, lambda grad, given: hook(name, _rows(grad), _rows(given)), given.detach())

    # A hook behind DeepSpeed's own hooks would recompute a checkpointed layer before ZeRO-3 fetches the module for its
    # backward: an order unlike training's, and the prefetch trace would be thrown away at every probe.
    with _on_forward(modules, hooked, first=True):
        yield


@contextmanager
def block_entries(modules: dict[str, Module], enter: Callable[[str, int], None]) -> Iterator[None]:
    """While active, every forward of a module calls enter(name, T).

    A module is given its tokens as its first floating-point tensor, (..., hidden): T of them.

    Raises:
        ValueError: (in the forward) a module is given no such tensor.
    """

    def hooked(module: Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        hidden = next((value for value in given if isinstance(value, Tensor) and value.is_floating_point()), None)
        if hidden is None:
            raise ValueError(f"{name}: {type(module).__name__} is called without a tensor of hidden states")
        enter(name, hidden.shape[:-1].numel())

    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: hooked(module, name, args, kwargs), with_kwargs=True
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
    """While active, every forward of a module calls hook(name, x (T, in))."""

    def seen(name: str, given: Tensor, _output: Tensor) -> None:
        hook(name, _rows(given.detach()))

    with _on_forward(modules, seen):
        yield


@contextmanager
def captured_logits(model: Module) -> Iterator[list[Tensor]]:
    """While active, collects the logits that a model returns, with their graph.

    Raises:
        ValueError: (in the forward) the model returns none.
    """
    found: list[Tensor] = []

    def returned(_name: str, _given: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise ValueError(
                f'importance "gauss_newton" draws labels from the logits, but {type(model).__name__} returned '
                f'{type(output).__name__} without any; use "fisher"'
            )
        found.append(logits)

    with _on_forward({"": model}, returned):
        yield found


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


@contextmanager
def _on_forward(
    modules: dict[str, Module], hook: Callable[[str, Tensor, Tensor], Any], first: bool = False
) -> Iterator[None]:
    """While active, hook(name, input, output) follows every forward; what it returns replaces the output.

    `first`: before the hooks that the modules have, such as DeepSpeed's. Compiled code, which does not look for new
    hooks, stands back.
    """
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
