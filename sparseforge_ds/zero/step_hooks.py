"""The hooks that keep DeepSpeed's master at m_eff W while the optimizer trains W.

Once masks are frozen, the hooks also keep pruned weights where they are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparseforge_ds.zero.extra_passes import ExtraPasses
from sparseforge_ds.zero.forge_error import ForgeError
from sparseforge_ds.zero.state import ShardState

_ELEMENTWISE = {
    *("adam", "adamw", "fusedadam", "deepspeedcpuadam", "adamax", "nadam", "radam", "rmsprop", "sgd"),
    *("adagrad", "deepspeedcpuadagrad", "lion", "fusedlion", "deepspeedcpulion"),
}
"""Lower-case names of optimizers that leave a weight at 0 if its gradient and moments are 0."""


class StepMethod(Protocol):
    """Part of a method that acts on prunable weights around a step of the inner optimizer."""

    trains_the_rest: bool
    """True to step weights that are not prunable, too."""

    @property
    def next_step(self) -> int:
        """Number of the optimizer step in progress; the first is 1."""

    @property
    def needs_previous_weights(self) -> bool:
        """True if publishing the step in progress needs W as it was before the step."""

    def before_step(self, index: int, gradient: Tensor, param_group: dict[str, Any]) -> Tensor | None:
        """Return the gradient to step a master partition's weights with; None to leave them as they are."""

    def after_step(self, index: int, param_group: dict[str, Any]) -> None:
        """Act on a master partition after the optimizer's step, before it is published."""

    def write_master(self, index: int, dense: Tensor, before: Tensor | None, step: int) -> None:
        """Write m_eff W after optimizer step `step` to a master partition, quantized if that has begun."""


class StepHooks:
    """Hooks on the step of the engine's inner optimizer, for as long as the engine lives."""

    def __init__(self, state: ShardState, method: StepMethod, extra_passes: ExtraPasses) -> None:
        """Attach the hooks.

        Args:
            state: state of the prunable weights.
            method: method whose masks are published.
            extra_passes: extra passes; while they harvest gradients, a step of the optimizer changes nothing.
        """
        self.state = state
        self.method = method
        self.extra_passes = extra_passes
        self.steps_begun = 0
        """Number of optimizer steps since `forge.step` last reset it; more than one means that a call is missing."""
        self._layout = state.layout
        self._masters: dict[int, Tensor] = {}
        """Masters that W stands in for during a step, by partition."""
        self._before: dict[int, Tensor] = {}
        """W before the step, by partition, if the method needs it."""
        self._gradients: list[tuple[Tensor, Tensor]] = []
        """Flats and gradients that were taken from the optimizer for the length of a step."""
        self._is_elementwise = type(self._layout.inner).__name__.lower() in _ELEMENTWISE
        self._masks_before_norm = self._layout.before_norm(self._mask_gradients)
        self._layout.inner.register_step_pre_hook(self._before_step)
        self._layout.inner.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _mask_gradients(self) -> None:
        """Zero gradients of frozen pruned weights, before DeepSpeed takes the norm that it clips by, and logs."""

        def mask(index: int, offset: int, gradient: Tensor) -> None:
            if index in self.state.shards_in:
                self.state.zero_pruned(index, gradient, offset)

        if self.state.frozen:
            self._layout.mask_gradients(mask)

    def _active(self) -> list[tuple[int, Tensor, dict[str, Any]]]:
        """Return the index, flat and param group of each partition in this call; ZeRO-3 steps one sub-group a call."""
        index_of = self._layout.index_of
        param_groups = self._layout.inner.param_groups
        return [(index_of[id(flat)], flat, owner) for owner in param_groups for flat in owner["params"]]

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Put W in the place of the master, and give the optimizer the gradients that the method wants."""
        self.require_finished()
        for index, flat, param_group in self._active():
            # A probe's step passes its gradients on and changes nothing.
            if self.extra_passes.harvest is not None:
                if flat.grad is not None:
                    self._withhold_gradient(flat)
                    self.extra_passes.harvest(index, self._gradients[-1][1].detach())
            elif index in self.state.shards_in:
                self._train_dense(index, flat)
                if flat.grad is not None:
                    if self.state.frozen and not self._masks_before_norm:
                        self.state.zero_pruned(index, flat.grad)
                    gradient = self.method.before_step(index, flat.grad, param_group)
                    if gradient is None:
                        self._withhold_gradient(flat)
                    else:
                        flat.grad = gradient
            elif not self.method.trains_the_rest and flat.grad is not None:
                self._withhold_gradient(flat)

    def _withhold_gradient(self, flat: Tensor) -> None:
        """Take a gradient from the optimizer until the step is over, so that it leaves the flat as it is."""
        assert flat.grad is not None
        self._gradients.append((flat, flat.grad))
        flat.grad = None

    def _train_dense(self, index: int, flat: Tensor) -> None:
        """Put W in the place of the master for the length of a step, if W is kept beside it."""
        dense = self.state.separate_dense(index)
        if dense is None:
            return
        master = flat.data
        dense = dense.view(flat.shape)
        self._masters[index] = master
        if self.method.needs_previous_weights:
            # The master is written anew after the step; until then it can hold W as it was before.
            self._before[index] = master.copy_(dense) if master.dtype == dense.dtype else dense.clone()
        _swap_data(flat, dense)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Put the master back in its place, and publish m_eff W to it."""
        for index, flat, param_group in self._active():
            if self.extra_passes.harvest is not None:
                continue
            before = self._before.pop(index, None)
            if self.method.next_step == 1:
                self.state.require_numeric_states(index)
            if index not in self.state.shards_in:
                continue
            self.state.adopt_into_optimizer_state(index)
            self.method.after_step(index, param_group)
            # Some optimizers move weights without gradient and moments.
            if self.state.released and not self._is_elementwise:
                self.state.zero_pruned(index, flat.data)
            if (master := self._masters.get(index)) is not None:
                dense = flat.data
                _swap_data(flat, master)
                self.method.write_master(index, dense, before, self.method.next_step)
                del self._masters[index]
            # ZeRO-3 calls once for each sub-group; one of them counts the step.
            if index == min(self.state.shards_in):
                self.steps_begun += 1
        # Give the gradients back: with offload DeepSpeed finds its buffers through them in the next step.
        for flat, gradient in self._gradients:
            flat.grad = gradient.to(flat.dtype)
        self._gradients.clear()

    def require_finished(self) -> None:
        """Raise ForgeError if W still stands in for some master, because an optimizer step has broken off."""
        if self._masters:
            raise ForgeError(
                "the last optimizer step broke off with an error, so that some weights may be stepped and others not; "
                "make a new engine, and go back to a checkpoint by engine.load_checkpoint"
            )


def _swap_data(flat: Tensor, data: Tensor) -> None:
    """Give a flat other data, of its shape, and its gradient in the dtype of the data."""
    gradient = flat.grad
    flat.grad = None
    flat.data = data
    flat.grad = None if gradient is None else gradient.to(flat.dtype)
