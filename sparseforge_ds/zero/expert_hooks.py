"""Hooks on the fused experts of a mixture during a probe: inputs and output gradients, expert by expert.

transformers looks up how experts are computed in a table of functions, by a name in the model's config. During a probe
the config names our function: the same mathematics, with a hook behind each of the two matmuls, before the routing
weights multiply. Tokens are sorted by expert, so that every expert has consecutive rows.

Llama 4's experts are not in that table. Each of them gets all tokens, as zeros if they are not routed to it. During a
probe their module has our forward, which leaves these zeros out of what a hook gets.

Legend of shape suffixes: T tokens, K experts of a token, S rows sorted by expert (T * K of them), E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from sparseforge_ds.transformers_internals import ALL_EXPERTS_FUNCTIONS, _grouped_linear
from sparseforge_ds.zero.layer_hooks import uncompiled, with_hook

ExpertHook = Callable[[str, str, Tensor | None, Tensor, Tensor, int], None]
"""Function of (module's name, its parameter's name, dL/dy (S, out) or None, x (S, in), one past each expert's last row
(E,), T). For every layer `down_proj` comes before `gate_up_proj` in a backward, and after it in a forward."""

_NAME = "sparseforge_probe"


@dataclass(frozen=True)
class _Listener:
    """Hook on one module."""

    name: str
    hook: ExpertHook
    loops: bool
    """True to compute expert by expert, with no demands on sizes; else by one grouped matmul."""
    gradients: bool
    """True to call the hook in backwards, with gradients; else in forwards."""


_listeners: dict[Module, _Listener] = {}
"""Listener of each module that is being probed."""
_implementations: dict[int, str | None] = {}
"""Original `_experts_implementation` of the modules' configs, by id(config)."""


def sees_all_tokens(module: Module) -> bool:
    """Return whether every expert of a module gets all tokens."""
    return type(module).__name__ == "Llama4TextExperts"


def why_unhookable(module: Module) -> str | None:
    """Return why a module's experts cannot be hooked, as the predicate of a sentence; None if they can."""
    if sees_all_tokens(module):
        return None
    if not isinstance(getattr(module, "gate_up_proj", None), Tensor) or not hasattr(module, "_apply_gate"):
        return "has no `gate_up_proj` and `_apply_gate`, the interface of transformers' fused experts"
    if getattr(module, "has_post_expert_norm", False):
        return "has norms behind its experts"
    if getattr(module, "_is_expert_parallel", False):
        return "is divided over the ranks by expert parallelism"
    return None


@contextmanager
def expert_tokens(modules: dict[str, Module], hook: ExpertHook, gradients: bool = True) -> Iterator[None]:
    """Call the hook twice in every backward through one of the modules while active.

    Without `gradients` it is called in every forward instead. Without modules nothing changes.

    Raises:
        ValueError: another hook of this kind is active in one of the modules.
    """
    if not modules:
        yield
        return
    if busy_modules := [name for name, module in modules.items() if module in _listeners]:
        raise ValueError(
            f"{busy_modules[0]}: another forge measures in this model; end it by its close() before you make a new one"
        )
    # Experts that are not in the table of functions get a forward of their own.
    replaced = [module for module in modules.values() if sees_all_tokens(module)]
    configs: dict[int, Any] = {id(m.config): m.config for m in modules.values() if m not in replaced}
    # A listener of the model may be active while copies of its blocks, which share a config, get another: the outer one
    # knows the original.
    outermost = [key for key, config in configs.items() if config._experts_implementation != _NAME]
    _implementations.update({key: configs[key]._experts_implementation for key in outermost})
    if _NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    for name, module in modules.items():
        loops = module in replaced or _implementations[id(module.config)] == "eager"
        _listeners[module] = _Listener(name, hook, loops, gradients)
    try:
        for module in replaced:
            module.forward = partial(_forward_on_all_tokens, module)
        for config in configs.values():
            config._experts_implementation = _NAME
        with uncompiled():
            yield
    finally:
        for module in modules.values():
            del _listeners[module]
        for module in replaced:
            vars(module).pop("forward", None)
        for key in outermost:
            configs[key]._experts_implementation = _implementations.pop(key)


def _forward(module: Any, hidden_TI: Tensor, expert_TK: Tensor, routing_TK: Tensor) -> Tensor:
    """Compute an experts module as its own forward does, with hooks if it is being probed.

    Modules that share a config with a probed one come here too.
    """
    if module not in _listeners:
        module.config._experts_implementation = _implementations[id(module.config)]
        try:
            output_TI: Tensor = type(module).forward(module, hidden_TI, expert_TK, routing_TK)
        finally:
            module.config._experts_implementation = _NAME
        return output_TI
    listener = _listeners[module]
    T, K = expert_TK.shape
    # Sort tokens by expert.
    expert_S, order_S = expert_TK.reshape(-1).sort(stable=True)
    number_E = torch.arange(module.num_experts, device=expert_S.device, dtype=expert_S.dtype)
    stop_E = torch.searchsorted(expert_S, number_E, right=True, out_int32=True)

    def matmul(x_SI: Tensor, parameter: str) -> Tensor:
        weight_E = getattr(module, parameter)
        transposed = module.is_transposed
        if listener.loops:
            runs = zip(x_SI.tensor_split(stop_E[:-1].cpu().long()), weight_E.unbind(0), strict=True)
            y_SO = torch.cat([x @ weight if transposed else F.linear(x, weight) for x, weight in runs])
        else:
            y_SO = _grouped_linear(x_SI, weight_E, stop_E, is_transposed=transposed)
        if module.has_bias:
            y_SO = y_SO + getattr(module, f"{parameter}_bias")[expert_S]
        return _with_listener(listener, parameter, y_SO, x_SI, stop_E, T)

    # Back in the order of tokens, the outputs of a token's K experts are summed.
    gated_SI = module._apply_gate(matmul(hidden_TI[order_S // K], "gate_up_proj"))
    weighted_SO = matmul(gated_SI, "down_proj") * routing_TK.reshape(-1)[order_S, None]
    placed_SO = torch.zeros_like(weighted_SO).index_copy(0, order_S, weighted_SO)
    return placed_SO.view(T, K, -1).sum(dim=1).to(hidden_TI.dtype)


def _with_listener(
    listener: _Listener, parameter: str, y_SO: Tensor, x_SI: Tensor, stop_E: Tensor, tokens: int
) -> Tensor:
    """Return a matmul's output with the listener's hook behind it, or call the hook now if it takes no gradients."""
    if not listener.gradients:
        listener.hook(listener.name, parameter, None, x_SI.detach(), stop_E, tokens)
    # The first pass of re-entrant checkpointing records no graph.
    elif torch.is_grad_enabled():

        def on_gradient(grad_SO: Tensor, x_SI: Tensor, stop_E: Tensor) -> None:
            listener.hook(listener.name, parameter, grad_SO, x_SI, stop_E, tokens)

        return with_hook(y_SO, on_gradient, x_SI.detach(), stop_E)
    return y_SO


def _forward_on_all_tokens(module: Any, hidden_NI: Tensor) -> Tensor:
    """Compute experts that get all tokens, N = E * T rows sorted by expert, with hooks on the routed rows."""
    listener = _listeners[module]
    E = module.num_experts
    # A token that is not routed to an expert is a row of zeros.
    routed_N = (hidden_NI != 0).any(dim=1)
    row_S = routed_N.nonzero()[:, 0]
    stop_E = routed_N.view(E, -1).sum(1).cumsum(0).int()
    T = len(hidden_NI) // E

    def matmul(x_NI: Tensor, parameter: str) -> Tensor:
        y_NO = torch.bmm(x_NI.view(E, T, -1), getattr(module, parameter)).view(E * T, -1)
        y_SO = _with_listener(listener, parameter, y_NO[row_S], x_NI[row_S], stop_E, T)
        return y_NO.index_copy(0, row_S, y_SO)

    gate, up = matmul(hidden_NI, "gate_up_proj").chunk(2, dim=-1)
    return matmul(up * module.act_fn(gate), "down_proj")
