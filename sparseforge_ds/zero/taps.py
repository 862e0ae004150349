"""What linear layers see and receive during a probe: their inputs, and the gradients of their outputs.

A tap is an identity in the autograd graph behind a linear layer. It saves the input through the graph's own machinery,
so that activation checkpointing recomputes it like any other activation instead of keeping it alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

TokenHook = Callable[[str, Tensor, Tensor], None]
InputHook = Callable[[str, Tensor], None]


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, hook: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.hook = hook
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        with torch.no_grad():
            ctx.hook(grad.reshape(-1, grad.shape[-1]), inputs.reshape(-1, inputs.shape[-1]))
        return grad, None, None


@contextmanager
def token_gradients(modules: dict[str, Module], hook: TokenHook) -> Iterator[None]:
    """While active, every backward through a module calls hook(name, dL/dy (T, out), x (T, in))."""

    def tapped(name: str, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not output.requires_grad:
            return output  # the first, recording-free pass of re-entrant checkpointing
        return _Tap.apply(output, args[0].detach(), lambda grad, inputs: hook(name, grad, inputs))  # type: ignore

    # A tap behind DeepSpeed's own hooks would recompute a checkpointed layer before ZeRO-3 fetches the module for its
    # backward: an order unlike training's, and the prefetch trace would be thrown away at every probe.
    with _on_forward(modules, tapped, first=True):
        yield


@contextmanager
def layer_inputs(modules: dict[str, Module], hook: InputHook) -> Iterator[None]:
    """While active, every forward of a module calls hook(name, x (T, in))."""

    def seen(name: str, args: tuple[Tensor, ...], _output: Tensor) -> None:
        hook(name, args[0].detach().reshape(-1, args[0].shape[-1]))

    with _on_forward(modules, seen):
        yield


@contextmanager
def captured_output(module: Module) -> Iterator[list[Tensor]]:
    """While active, collects the outputs of a module with their graph (the logits of an output embedding)."""
    outputs: list[Tensor] = []
    with _on_forward({"": module}, lambda _name, _args, output: outputs.append(output)):
        yield outputs


@contextmanager
def _on_forward(
    modules: dict[str, Module], hook: Callable[[str, tuple[Tensor, ...], Tensor], Any], first: bool = False
) -> Iterator[None]:
    """While active, hook(name, inputs, output) follows every forward; what it returns replaces the output.

    `first`: before the hooks that the modules have, such as DeepSpeed's.
    """
    handles = [
        module.register_forward_hook(lambda _module, args, output, name=name: hook(name, args, output), prepend=first)
        for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
