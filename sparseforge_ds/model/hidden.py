"""Distillation of hidden states: the student's layers are drawn to hand on what the teacher's layers hand on.

    d_l = mean over tokens of  |h_student - h_teacher|^2 / |h_teacher|^2     behind layer l
    L   = (eq. 12)  +  hidden.weight * mean over the compared layers of d_l

Each token counts relative to its own length, so that the few very long ones do not drown the others. An identity in the
graph computes the distance behind the layer, and saves nothing but the two states.

Shape suffixes: B sequences, S positions, T tokens (B * S), H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from sparseforge_ds.config import DistillationConfig, HiddenConfig
from sparseforge_ds.model.basis import basis_of
from sparseforge_ds.model.distill import DistillationLoss, block_slices, refuse_second_derivative, tokens_per_block
from sparseforge_ds.model.token_losses import IGNORED
from sparseforge_ds.transformers_internals import GradientCheckpointingLayer


def compared_layers(model: nn.Module, config: HiddenConfig) -> list[nn.Module]:
    """Return the transformer layers behind which states are compared, in the order in which they run.

    Raises:
        ValueError: the model has no layers that transformers can checkpoint, which is how layers are recognised.
    """
    layers: dict[str, nn.Module] = {}
    # Blocks of a vision tower have states of patches, which are no tokens.
    language_model = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    for name, module in language_model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, GradientCheckpointingLayer) and not is_inside:
            layers[name] = module
    if not layers:
        raise ValueError(
            f"distillation.hidden: {type(model).__name__} has no layers of transformers' GradientCheckpointingLayer, "
            'behind which hidden states could be compared; set "hidden" to null'
        )
    in_order = list(layers.values())
    # Every k-th layer is counted from the last one.
    return in_order[-1:] if config.every is None else in_order[:: -config.every][::-1]


def check_same_states(student: Any, teacher: Any, folder: Path, teacher_folder: Path) -> None:
    """Raise ValueError unless the hidden states of two models, given by config and folder, can be compared."""
    for key, unit in (("hidden_size", "wide"), ("num_hidden_layers", "layers deep")):
        student_size, teacher_size = (getattr(config.get_text_config(), key, None) for config in (student, teacher))
        if student_size != teacher_size:
            raise ValueError(
                f"distillation.hidden compares hidden states layer by layer, but the student is {student_size} {unit} "
                f"and the teacher {teacher_size}; use a teacher of the same {key}, such as the dense model itself, or "
                'set "hidden" to null'
            )
    if basis_of(folder) != basis_of(teacher_folder):
        raise ValueError(
            f"teacher {teacher_folder} has its channels in another order or basis than {folder}, the model, and "
            'distillation.hidden compares them one by one; give another teacher, or set "hidden" to null'
        )


@contextmanager
def capture_states(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the hidden state (B, S, H) that each layer returns while the block runs."""
    states: list[Tensor] = []
    with ExitStack() as stack:
        for layer in layers:
            hook = layer.register_forward_hook(lambda _layer, _inputs, output: states.append(_state(output)))
            stack.enter_context(hook)
        yield states


class HiddenLoss:
    """Result of `compare_hidden`: the loss of hidden states, known after the forward pass."""

    def __init__(self, weight: float = 0.0) -> None:
        self.weight = weight
        self.mean: Tensor | None = None
        """Mean of d_l, () in fp32 with its graph; None if nothing was compared."""

    def add_to(self, losses: DistillationLoss) -> DistillationLoss:
        """Return the losses of logits with that of hidden states added."""
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
    """Compare the student's forward pass in the block with its teacher's hidden states.

    The first call gives the student's layers a forward hook for good, which does nothing in other passes.

    Args:
        student: the model that the block runs, once.
        states: (B, S, H) of `capture_states`, which are freed in the backward pass; None to compare nothing.
        next_T: (T,) label that each token predicts; ignored ones do not count.
        config: its `hidden` is used.
        trained: divisor of the sums over tokens, see `distillation_loss`.

    Raises:
        ValueError: states of other shapes, more or less than one pass of every layer, or a kind of checkpointing that
            keeps the graph from the layers.
    """
    if config.hidden is None or states is None:
        if config.hidden is not None:
            raise ValueError(
                "distillation.hidden is set, but the target has no hidden states of the teacher; get it from the "
                "targets of a Teacher that was made with this configuration"
            )
        yield HiddenLoss()
        return
    # Hooks of an earlier call serve again, unless other layers are compared now.
    layers = compared_layers(student, config.hidden)
    if student not in _hooks_of_students or _hooks_of_students[student].layers != layers:
        _hooks_of_students[student] = _StudentHooks(layers, _hooks_of_students.get(student))
    hooks = _hooks_of_students[student]
    if len(states) != len(layers):
        raise ValueError(f"{len(states)} hidden states of a teacher for {len(layers)} layers of the student")
    loss = HiddenLoss(config.hidden.weight)
    hooks.targets = _Targets(states, next_T != IGNORED, trained)
    hooks.distances = {}
    try:
        yield loss
        # Each layer's hook has left its distance.
        if len(hooks.distances) != len(layers):
            raise ValueError(f"{len(hooks.distances)} of {len(layers)} layers ran in a pass that is compared")
        loss.mean = torch.stack(list(hooks.distances.values())).mean()
        without_graph = torch.is_grad_enabled() and not loss.mean.requires_grad
        if without_graph and any(parameter.requires_grad for parameter in student.parameters()):
            raise ValueError(
                "distillation.hidden: the layers that are compared run without a gradient, as under re-entrant "
                'checkpointing of whole layers; use activation_checkpointing_kwargs={"use_reentrant": False} '
                "(gradient_checkpointing_kwargs in older releases of transformers)"
            )
    finally:
        hooks.distances = None
        # The backward pass needs the targets.
        if loss.mean is None or not loss.mean.requires_grad:
            hooks.targets = None


class _StudentHooks:
    """Forward hooks on a student's layers, which compute the distances of the pass that is compared."""

    def __init__(self, layers: list[nn.Module], previous: _StudentHooks | None) -> None:
        """Replace the hooks that the student had before."""
        for handle in previous.handles if previous else ():
            handle.remove()
        self.layers = layers
        self.targets: _Targets | None = None
        """Targets of the last pass that was compared."""
        self.distances: dict[int, Tensor] | None = None
        """Distance by number of the layer, while a forward pass is compared."""
        # DeepSpeed's hooks come behind ours: else a checkpointed layer would be recomputed before it is gathered.
        self.handles: list[RemovableHandle] = [
            layer.register_forward_hook(
                lambda _layer, _inputs, output, n=number: self._compare(n, output), prepend=True
            )
            for number, layer in enumerate(layers)
        ]

    def _compare(self, number: int, output: Any) -> Any:
        """Return a layer's output with its distance in the graph, or None to leave it as it is."""
        targets = self.targets
        if targets is None or not targets.states:  # no pass is compared, or its backward pass is done
            return None
        if self.distances is None and not torch.is_grad_enabled():  # another pass, and the backward pass never comes
            return None
        state_BSH = _state(output)
        teacher_BSH = targets.states[number]
        if state_BSH.shape != teacher_BSH.shape:
            if self.distances is None:  # another pass, and the backward pass never comes
                return None
            raise ValueError(
                f"distillation.hidden: the student's layer returns {tuple(state_BSH.shape)} and the teacher's "
                f"{tuple(teacher_BSH.shape)}; use a teacher of the same hidden_size"
            )
        state_BSH, distance = _DistanceFunction.apply(state_BSH, teacher_BSH, targets)  # type: ignore[no-untyped-call]
        if self.distances is not None:  # else checkpointing computes the layer again for its backward pass
            self.distances[number] = distance
            targets.pending += distance.requires_grad
        return (state_BSH, *output[1:]) if isinstance(output, tuple) else state_BSH


_hooks_of_students: WeakKeyDictionary[nn.Module, _StudentHooks] = WeakKeyDictionary()


class _Targets:
    """The teacher's states of one pass, kept until its backward pass is done."""

    def __init__(self, states: list[Tensor], trained_T: Tensor, trained: float | None) -> None:
        """Count the tokens.

        Args:
            states: (B, S, H) of each layer.
            trained_T: True for the tokens that count.
            trained: divisor of the sums over tokens; None for the number of those that count.
        """
        self.states = states
        self.trained_T = trained_T
        self.trained = trained_T.sum() if trained is None else trained
        self.pending = 0
        """Layers whose backward pass is still to come."""


class _DistanceFunction(torch.autograd.Function):
    """Identity on a state that returns d_l beside it."""

    @staticmethod
    def forward(ctx: Any, state_BSH: Tensor, teacher_BSH: Tensor, targets: _Targets) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(state_BSH, teacher_BSH)
        ctx.targets = targets
        total = torch.zeros((), dtype=torch.promote_types(state_BSH.dtype, torch.float32), device=state_BSH.device)
        for _rows, difference_TH, factor_T1 in _differences(state_BSH, teacher_BSH, targets):
            total += difference_TH.square_().mul_(factor_T1).sum()
        return state_BSH.detach(), total

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor, grad_distance: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        refuse_second_derivative()
        state_BSH, teacher_BSH = ctx.saved_tensors
        result_BSH = torch.empty_like(state_BSH, memory_format=torch.contiguous_format)
        result_TH = result_BSH.flatten(0, 1)
        grad_TH = grad_BSH.flatten(0, 1)
        for rows, difference_TH, factor_T1 in _differences(state_BSH, teacher_BSH, ctx.targets):
            result_TH[rows] = difference_TH.mul_(factor_T1).mul_(2 * grad_distance).add_(grad_TH[rows])
        # After the last layer's backward pass nothing needs the states.
        ctx.targets.pending -= 1
        if ctx.targets.pending == 0:
            ctx.targets.states.clear()
        return result_BSH, None, None


def _differences(state_BSH: Tensor, teacher_BSH: Tensor, targets: _Targets) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each block of tokens its rows, student less teacher (T, H), and the factor of its square (T, 1)."""
    exact = torch.promote_types(state_BSH.dtype, torch.float32)
    state_TH = state_BSH.flatten(0, 1)
    teacher_TH = teacher_BSH.flatten(0, 1)
    for rows in block_slices(len(state_TH), tokens_per_block(state_TH.shape[1])):
        target_TH = teacher_TH[rows].to(exact)
        power_T1 = target_TH.square().sum(-1, keepdim=True).clamp_min(torch.finfo(exact).eps)
        factor_T1 = targets.trained_T[rows, None] / (power_T1 * targets.trained)
        yield rows, torch.sub(state_TH[rows], target_TH), factor_T1


def _state(output: Any) -> Tensor:
    """Return the hidden states in a layer's output, which may be a tuple."""
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state
