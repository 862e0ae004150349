"""An extra forward and backward at a step boundary that leaves no trace (design 2.1).

The backward is the engine's own. Where gradients of weights are wanted, they are reduced, unscaled and partitioned as
in training; the optimizer is then stepped while `Probe.harvest` is set: the step hooks hand over the gradients and
leave every parameter alone. Where layer hooks see all that is wanted, no weight gets a gradient and nothing is reduced.
Everything that DeepSpeed counts or scales on the way is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from sparseforge_ds.zero.shard import Shard, ShardLayout

Closure = Callable[[], Tensor]
"""Runs the engine's forward on one micro-batch and returns the scalar loss."""
Harvest = Callable[[int, Tensor], None]
"""Gets the index of a master partition and its averaged, unscaled, unclipped gradient."""


class ProbeBatches(Protocol):
    """The sequences that probes read. A batch is the same sequences on any number of ranks.

    Where losses are not means over all tokens of their micro-batch, `divisor(batch)` is what they divide the sum by,
    and `predicted(batch)` says of every micro-batch, (tokens,), what is trained on: not what is -100.
    """

    def passes(self, batch: int) -> Sequence[Closure]:
        """This rank's micro-batches of probe batch `batch`, counted from 0; as many on every rank."""
        ...


def batches_of(probe: Closure | ProbeBatches) -> ProbeBatches:
    """What a probe reads; a bare closure stands for batches of the one micro-batch that it runs."""
    return _OneMicroBatch(probe) if callable(probe) else probe


def divisor_of(batches: ProbeBatches, batch: int) -> float | None:
    """What the losses of a batch divide the sum over their tokens by; None where that is the number of tokens."""
    divisor: Callable[[int], float | None] | None = getattr(batches, "divisor", None)
    return None if divisor is None else divisor(batch)


def predicted_of(batches: ProbeBatches, batch: int) -> Sequence[Tensor | None]:
    """Labels of each micro-batch of a batch, at the places that predict them; None where all are trained on."""
    predicted: Callable[[int], Sequence[Tensor]] | None = getattr(batches, "predicted", None)
    return [None] * len(batches.passes(batch)) if predicted is None else predicted(batch)


@dataclass(frozen=True)
class _OneMicroBatch:
    closure: Closure

    def passes(self, batch: int) -> Sequence[Closure]:
        return (self.closure,)


# What a step of DeepSpeed's optimizers counts or caches, beside the loss scaler.
_OPTIMIZER_SCALARS = ("overflow", "_global_grad_norm", "clip_grad", "_hp_optimizer_states_linked")


class Probe:
    """Runs extra passes on one engine."""

    def __init__(self, layout: ShardLayout) -> None:
        self.layout = layout
        self.harvest: Harvest | None = None
        """While set, a step of the optimizer hands its gradients to this and changes nothing."""

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step, by which the engine divides every loss."""
        return int(self.layout.engine.gradient_accumulation_steps())

    @property
    def backward_scale(self) -> float:
        """What dL/dy is multiplied by during a probe's backward pass."""
        return self.layout.loss_scale / self.accumulation

    def gradients(self, passes: Sequence[Closure], harvest: Harvest) -> bool:
        """Forward and backward of every pass; `harvest(flat, gradient)` sees every master partition's mean gradient.

        Args:
            passes: each runs the engine forward on a micro-batch and returns the scalar loss.
            harvest: gets the index of a master partition and its averaged, unscaled, unclipped gradient.

        Returns:
            False when the gradients overflowed in fp16 and nothing was harvested.
        """
        engine, optimizer = self.layout.engine, self.layout.optimizer
        harvested = False

        def on_gradient(index: int, gradient: Tensor) -> None:
            nonlocal harvested
            harvested = True
            share = self.accumulation / len(passes)
            harvest(index, gradient if share == 1 else gradient * share)

        with self._untraced():
            self.forget_gradients()
            # The engine divides by the accumulation steps, and so does not overflow where training does not; a probe
            # may have another number of passes, so that the mean over them is formed afterwards.
            self._backward(passes)
            self.harvest = on_gradient
            try:
                optimizer.step()
            finally:
                self.harvest = None
            optimizer.zero_grad()
            if optimizer is self.layout.inner:
                engine.zero_grad()
            self.forget_gradients()
        return harvested

    def activations(self, passes: Sequence[Closure]) -> None:
        """Forward and backward of every pass, in which activations have gradients and weights have none.

        For hooks: they get what they get in `gradients`, bit for bit. They tell of an overflow by numbers that are not
        finite. Under leaf modules weights do have gradients: ZeRO-3 reduces theirs whether there are any or not.
        """
        engine = self.layout.engine
        if getattr(self.layout.optimizer, "leaf_parameters", None):
            self.gradients(passes, lambda _index, _gradient: None)
            return
        with self._untraced(), _without_weight_gradients(engine.module):
            reduces, engine.enable_backward_allreduce = engine.enable_backward_allreduce, False  # stage 2 would
            try:
                self._backward(passes)
            finally:
                engine.enable_backward_allreduce = reduces

    def usable(self, *measured: Tensor) -> bool:
        """Whether what hooks measured did not overflow in fp16 on any rank; other dtypes cannot. Collective."""
        if next(iter(self.layout.low_precision.values())).dtype != torch.float16:
            return True
        overflowed = torch.zeros((), device=self.layout.device)
        for values in measured:
            overflowed += (~values.isfinite()).any().to(overflowed.device)
        return bool((self.layout.all_reduce(overflowed) == 0).item())

    def forget_gradients(self) -> None:
        """ZeRO-3 hands a parameter that is unused in a step what this buffer held in the one before."""
        buffer = getattr(self.layout.optimizer, "grad_partitions_flat_buffer", None)
        if isinstance(buffer, Tensor):
            buffer.zero_()

    def loss(self, closure: Closure) -> Tensor:
        """Forward only, without a graph: the detached scalar loss of this rank's batch."""
        with self._untraced(), torch.no_grad():
            return closure().detach().float()

    def _backward(self, passes: Sequence[Closure]) -> None:
        engine = self.layout.engine
        for number, closure in enumerate(passes):
            engine.set_gradient_accumulation_boundary(number == len(passes) - 1)
            loss = closure()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"the probe returned {type(loss).__name__}, not a scalar loss with a graph; "
                    "pass a function like lambda: engine(**batch).loss"
                )
            engine.backward(loss)

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        engine, optimizer, inner = self.layout.engine, self.layout.optimizer, self.layout.inner
        boundary = engine._is_gradient_accumulation_boundary
        scalars = {name: getattr(optimizer, name) for name in _OPTIMIZER_SCALARS if hasattr(optimizer, name)}
        scalers = [(holder, dict(holder.__dict__)) for holder in self.layout.loss_scalers()]
        groups: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if key != "params"} for group in inner.param_groups
        ]
        accelerator = get_accelerator()
        cpu_rng, device_rng = torch.get_rng_state(), accelerator.get_rng_state()
        if "clip_grad" in scalars:
            optimizer.clip_grad = 0.0
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(boundary)
            for name, value in scalars.items():
                setattr(optimizer, name, value)
            for holder, values in scalers:
                holder.__dict__.update(values)
            for group, values in zip(inner.param_groups, groups, strict=True):
                group.update(values)
            torch.set_rng_state(cpu_rng)
            accelerator.set_rng_state(device_rng)


@contextmanager
def _without_weight_gradients(model: Any) -> Iterator[None]:
    """No parameter requires a gradient; what the model embeds its tokens as does, for recomputed blocks to have one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    embedding: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None

    def require(_module: Any, _args: Any, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    # Before DeepSpeed's hooks, which then see what they see in training.
    handle = None if embedding is None else embedding.register_forward_hook(require, prepend=True)
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        if handle is not None:
            handle.remove()


def reduce_to_shard(
    layout: ShardLayout, shard: Shard, ranges: list[tuple[int, int]], full: Tensor, first: int = 0
) -> tuple[slice, Tensor]:
    """Sum flat elements of a weight over the ranks and keep those of this rank. Collective.

    Args:
        layout: of the engine.
        shard: this rank's part of the weight.
        ranges: (start, stop) of the weight on every rank.
        full: (n,) contribution of this rank to n consecutive elements, or all, of the weight; overwritten.
        first: number of the first of them in the weight.

    Returns:
        Which elements of the shard these are, and their sums over the ranks.
    """
    numel = full.numel()
    mine = slice(*(min(max(end, first), first + numel) - first for end in (shard.start, shard.stop)))
    ours = max(first - shard.start, 0)
    inside = slice(ours, ours + mine.stop - mine.start)
    if layout.world_size == 1:
        return inside, full
    if layout.replicated:
        return inside, layout.all_reduce(full)
    inner = [
        (min(max(start, first), first + numel) - first, min(max(stop, first), first + numel) - first)
        for start, stop in ranges
    ]
    length = inner[0][1] - inner[0][0]
    missing = length * layout.world_size - numel
    # A weight that one rank holds whole (stages 1 and 2) would be padded to as many times its size.
    if 0 <= missing < layout.world_size and all(
        (start, stop) == (min(rank * length, numel), min((rank + 1) * length, numel))
        for rank, (start, stop) in enumerate(inner)
    ):
        padded = torch.nn.functional.pad(full, (0, missing)) if missing else full
        received = full.new_empty(length)
        layout.reduce_scatter(received, padded)
        return inside, received[: mine.stop - mine.start]
    for owner, (start, stop) in enumerate(inner):
        if stop > start:
            layout.reduce(full[start:stop], owner)
    return inside, full[mine]
