"""Distillation of hidden states: what layers of the student hand on is drawn to what the teacher's hand on.

    d_l = mean over tokens of  |h_student - h_teacher|^2 / |h_teacher|^2     behind layer l
    L   = (eq. 12)  +  hidden.weight * mean over the chosen layers of d_l

Each token counts by its own length, so that the few very long ones do not drown the others. The distance is formed
where the layer returns, by an identity in the graph that saves nothing but the two states.

Shape suffixes: B sequences, S positions, T tokens (B * S), H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparseforge_ds.config import DistillationConfig, HiddenConfig
from sparseforge_ds.model.distill import IGNORED, DistillationLoss, blocks, first_derivative_only
from sparseforge_ds.transformers_internals import GradientCheckpointingLayer


def compared_layers(model: nn.Module, config: HiddenConfig) -> list[nn.Module]:
    """The transformer layers behind which states are compared, in the order in which they run. Raises ValueError where
    the model has no layers that transformers can checkpoint, which is how they are known."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            found[name] = module
    if not found:
        raise ValueError(
            f"distillation.hidden: {type(model).__name__} has no layers of transformers' GradientCheckpointingLayer, "
            'behind which hidden states could be compared; set "hidden" to null'
        )
    layers = list(found.values())
    return layers[-1:] if config.every is None else layers[:: -config.every][::-1]


def same_states(student: Any, teacher: Any) -> None:
    """Raise a ValueError where the states of models of these configs cannot be compared layer by layer."""
    for key, what in (("hidden_size", "wide"), ("num_hidden_layers", "layers deep")):
        mine, other = (getattr(config.get_text_config(), key, None) for config in (student, teacher))
        if mine != other:
            raise ValueError(
                f"distillation.hidden compares hidden states layer by layer, but the student is {mine} {what} and the "
                f'teacher {other}; use a teacher of the same {key}, such as the dense model itself, or set "hidden" to '
                "null"
            )


@contextmanager
def capture_states(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """While active, collects the (B, S, H) hidden state that each layer returns."""
    found: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _layer, _given, output: found.append(_state(output))) for layer in layers
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class HiddenLoss:
    """What `compare_hidden` found."""

    def __init__(self, weight: float = 0.0) -> None:
        self.weight = weight
        self.mean: Tensor | None = None
        """() fp32 with its graph, after the pass; None where nothing was compared."""

    def add_to(self, losses: DistillationLoss) -> DistillationLoss:
        """The losses of logits with that of hidden states."""
        if self.mean is None:
            return losses
        return losses._replace(total=losses.total + self.weight * self.mean, hidden=self.mean.detach())


@contextmanager
def compare_hidden(
    student: nn.Module,
    states: list[Tensor] | None,
    next_T: Tensor,
    config: DistillationConfig,
    trained: float | None = None,
) -> Iterator[HiddenLoss]:
    """While active, a forward pass of the student is compared with its teacher's; nothing is without states.

    A student's layers get a forward hook for good at the first time, which does nothing in other passes. Raises
    ValueError for states of different shapes, for anything but one pass of every layer, and where checkpointing keeps
    the graph from it.

    Args:
        states: (B, S, H) of `capture_states`, which are let go of in the backward pass.
        next_T: (T,) what each token predicts; those that predict nothing do not count.
        trained: what sums over the tokens that count are divided by, see `distillation_loss`.
    """
    if config.hidden is None or states is None:
        if config.hidden is not None:
            raise ValueError(
                "distillation.hidden is set, but the target has no hidden states of the teacher; get it from the "
                "targets of a Teacher that was made with this configuration"
            )
        yield HiddenLoss()
        return
    layers = compared_layers(student, config.hidden)
    if student not in _students or _students[student].layers != layers:
        _students[student] = _StudentHooks(layers, _students.get(student))
    hooked, distance = _students[student], HiddenLoss(config.hidden.weight)
    if len(states) != len(layers):
        raise ValueError(f"{len(states)} hidden states of a teacher for {len(layers)} layers of the student")
    hooked.batch, hooked.found = _Targets(states, next_T != IGNORED, config.chunk_tokens, trained), {}
    try:
        yield distance
        if len(hooked.found) != len(layers):
            raise ValueError(f"{len(hooked.found)} of {len(layers)} layers ran in a pass that is compared")
        distance.mean = torch.stack(list(hooked.found.values())).mean()
        lost = torch.is_grad_enabled() and not distance.mean.requires_grad
        if lost and any(parameter.requires_grad for parameter in student.parameters()):
            raise ValueError(
                "distillation.hidden: the layers that are compared run without a gradient, as under re-entrant "
                'checkpointing of whole layers; use activation_checkpointing_kwargs={"use_reentrant": False} '
                "(gradient_checkpointing_kwargs in older releases of transformers)"
            )
    finally:
        hooked.found = None
        if distance.mean is None or not distance.mean.requires_grad:
            hooked.batch = None


class _StudentHooks:
    """The hooks of a student's layers, instead of those that it had."""

    def __init__(self, layers: list[nn.Module], before: _StudentHooks | None) -> None:
        for handle in before.handles if before else ():
            handle.remove()
        self.layers = layers
        self.batch: _Targets | None = None
        self.found: dict[int, Tensor] | None = None
        """Distances by layer, while a forward pass is compared."""
        # Before the hooks of DeepSpeed: behind them a checkpointed layer would be recomputed before it is gathered.
        self.handles: list[RemovableHandle] = [
            layer.register_forward_hook(lambda _layer, _given, output, n=number: self._seen(n, output), prepend=True)
            for number, layer in enumerate(layers)
        ]

    def _seen(self, number: int, output: Any) -> Any:
        batch = self.batch
        if batch is None or not batch.states:  # no pass that is compared, or its backward is done
            return None
        if self.found is None and not torch.is_grad_enabled():  # another pass, before a backward that is left out
            return None
        state_BSH, teacher_BSH = _state(output), batch.states[number]
        if state_BSH.shape != teacher_BSH.shape:
            raise ValueError(
                f"distillation.hidden: the student's layer returns {tuple(state_BSH.shape)} and the teacher's "
                f"{tuple(teacher_BSH.shape)}; use a teacher of the same hidden_size"
            )
        state_BSH, distance = _DistanceFunction.apply(state_BSH, teacher_BSH, batch)  # type: ignore[no-untyped-call]
        if self.found is not None:  # else the layer is computed again for its backward pass
            self.found[number] = distance
            batch.pending += distance.requires_grad
        return (state_BSH, *output[1:]) if isinstance(output, tuple) else state_BSH


_students: WeakKeyDictionary[nn.Module, _StudentHooks] = WeakKeyDictionary()


class _Targets:
    """What a pass is compared with, until its backward pass is done."""

    def __init__(self, states: list[Tensor], trained_T: Tensor, block: int, trained: float | None) -> None:
        self.states = states
        self.trained_T = trained_T
        self.trained = trained_T.sum() if trained is None else trained
        self.block = block
        self.pending = 0


class _DistanceFunction(torch.autograd.Function):
    """An identity, and d_l beside it."""

    @staticmethod
    def forward(ctx: Any, state_BSH: Tensor, teacher_BSH: Tensor, batch: _Targets) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(state_BSH, teacher_BSH)
        ctx.batch = batch
        total = torch.zeros((), dtype=torch.promote_types(state_BSH.dtype, torch.float32), device=state_BSH.device)
        for _rows, difference_TH, weight_T1 in _differences(state_BSH, teacher_BSH, batch):
            total += difference_TH.square_().mul_(weight_T1).sum()
        return state_BSH.detach(), total

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor, of_distance: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        first_derivative_only()
        state_BSH, teacher_BSH = ctx.saved_tensors
        found_BSH = torch.empty_like(state_BSH, memory_format=torch.contiguous_format)
        found_TH, grad_TH = found_BSH.flatten(0, 1), grad_BSH.flatten(0, 1)
        for rows, difference_TH, weight_T1 in _differences(state_BSH, teacher_BSH, ctx.batch):
            found_TH[rows] = difference_TH.mul_(weight_T1).mul_(2 * of_distance).add_(grad_TH[rows])
        ctx.batch.pending -= 1
        if ctx.batch.pending == 0:
            ctx.batch.states.clear()
        return found_BSH, None, None


def _differences(state_BSH: Tensor, teacher_BSH: Tensor, batch: _Targets) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """By blocks of tokens: which, (T, H) student less teacher, and (T, 1) what its square counts for."""
    exact = torch.promote_types(state_BSH.dtype, torch.float32)
    state_TH, teacher_TH = state_BSH.flatten(0, 1), teacher_BSH.flatten(0, 1)
    for rows in blocks(len(state_TH), batch.block):
        aim_TH = teacher_TH[rows].to(exact)
        power_T1 = aim_TH.square().sum(-1, keepdim=True).clamp_min(torch.finfo(exact).eps)
        weight_T1 = batch.trained_T[rows, None] / (power_T1 * batch.trained)
        yield rows, torch.sub(state_TH[rows], aim_TH), weight_T1


def _state(output: Any) -> Tensor:
    """What a layer hands on to the next."""
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state
