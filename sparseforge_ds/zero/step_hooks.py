"""The two optimizer hooks that keep DeepSpeed's master at m_eff W while the optimizer trains W."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparseforge_ds.zero.probe import Probe
from sparseforge_ds.zero.state import ShardState

_BY_ELEMENT = {
    *("adam", "adamw", "fusedadam", "deepspeedcpuadam", "adamax", "nadam", "radam", "rmsprop", "sgd"),
    *("adagrad", "deepspeedcpuadagrad", "lion", "fusedlion", "deepspeedcpulion"),
}
"""Optimizers that leave a weight at 0 whose gradient and moments are 0, by their names in lower case."""


class StepMethod(Protocol):
    """What happens to prunable weights around a step of the inner optimizer."""

    trains_the_rest: bool
    """Whether weights that are not prunable are stepped."""

    @property
    def next_step(self) -> int:
        """The optimizer step that is being made, the first being 1."""

    @property
    def needs_previous_weights(self) -> bool:
        """Whether publishing the step that begins needs W as it is now."""

    def before_step(self, index: int, gradient: Tensor, group: dict[str, Any]) -> Tensor | None:
        """The gradient to step the weights of a master partition with; None to leave them alone."""

    def after_step(self, index: int, group: dict[str, Any]) -> None:
        """Before a partition is published."""

    def publish(self, index: int, dense: Tensor, before: Tensor | None, out: Tensor, step: int) -> None:
        """Write m_eff W of a partition after optimizer step `step` to `out`."""


class StepHooks:
    """Attached to the engine's inner optimizer for as long as the engine lives."""

    def __init__(self, state: ShardState, method: StepMethod, probe: Probe, gradients_are_masked: bool) -> None:
        """Attach.

        Args:
            state: of the prunable weights.
            method: whose masks are published.
            probe: which takes the gradients of a step of its own, in which nothing else happens.
            gradients_are_masked: whether those of frozen pruned weights are 0 already (`zero.gradient_hooks`).
        """
        self.state = state
        self.method = method
        self.probe = probe
        self.gradients_are_masked = gradients_are_masked
        self.steps_begun = 0
        """Optimizer steps applied since the owner last looked; more than one is a missed `forge.step`."""
        self._layout = state.layout
        self._masters: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._by_element = type(self._layout.inner).__name__.lower() in _BY_ELEMENT
        self._layout.inner.register_step_pre_hook(self._before_step)
        self._layout.inner.register_step_post_hook(self._after_step)

    def _active(self) -> list[tuple[int, Tensor, dict[str, Any]]]:
        """Master partitions that take part in this call, and their groups: ZeRO-3 steps one sub-group at a time."""
        index_of, groups = self._layout.index_of, self._layout.inner.param_groups
        return [(index_of[id(flat)], flat, group) for group in groups for flat in group["params"]]

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        prunable = set(self.state.flats)
        for index, flat, group in self._active():
            if self.probe.harvest is not None:
                if flat.grad is not None:
                    self._gradients.append((flat, flat.grad))
                    self.probe.harvest(index, flat.grad.detach())
                    flat.grad = None
            elif index in prunable:
                self._train_dense(index, flat)
                if flat.grad is not None:
                    if self.state.frozen and not self.gradients_are_masked:
                        self.state.zero_pruned(index, flat.grad)
                    used = self.method.before_step(index, flat.grad, group)
                    if used is None:
                        self._gradients.append((flat, flat.grad))
                    flat.grad = used
            elif not self.method.trains_the_rest and flat.grad is not None:
                self._gradients.append((flat, flat.grad))
                flat.grad = None

    def _train_dense(self, index: int, flat: Tensor) -> None:
        """Let the optimizer find W in the place of the master, where W is kept beside it."""
        dense = self.state.separate_dense(index)
        if dense is None:
            return
        gradient, flat.grad = flat.grad, None
        master, dense = flat.data, dense.view(flat.shape)
        self._masters[index] = master
        if self.method.needs_previous_weights:
            # The master is written anew after the step; until then it can hold what the step began from.
            self._before[index] = master.copy_(dense) if master.dtype == dense.dtype else dense.clone()
        flat.data = dense
        flat.grad = None if gradient is None else gradient.to(flat.dtype)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        prunable = set(self.state.flats)
        for index, flat, group in self._active():
            if self.probe.harvest is not None:
                continue
            before = self._before.pop(index, None)
            if self.method.next_step == 1:
                self.state.require_numeric_states(index)
            if index not in prunable:
                continue
            self.state.adopt_into_optimizer_state(index)
            self.method.after_step(index, group)
            if self.state.released and not self._by_element:
                self.state.zero_pruned(index, flat.data)
            if (master := self._masters.pop(index, None)) is not None:
                gradient, flat.grad = flat.grad, None
                dense, flat.data = flat.data, master
                flat.grad = None if gradient is None else gradient.to(flat.dtype)
                self.method.publish(index, dense, before, flat.data, self.method.next_step)
            if index == self.state.flats[0]:
                self.steps_begun += 1
        for flat, gradient in self._gradients:
            flat.grad = gradient.to(flat.dtype)  # offload keeps the buffer and would lose it
        self._gradients.clear()
