"""Extra forward and backward passes at a step boundary that leave no trace in training.

The backward is the engine's own. `ExtraPasses.gradients` reduces, unscales and partitions gradients of weights as
in training, and steps the optimizer while `ExtraPasses.harvest` is set: the step hooks then pass on the gradients and
leave every parameter alone. `ExtraPasses.activations` serves layer hooks: no weight gets a gradient, and nothing is
reduced. Everything that DeepSpeed counts or scales on the way is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from sparseforge_ds.zero.forge_error import ForgeError
from sparseforge_ds.zero.shard import Shard, ShardLayout

Closure = Callable[[], Tensor]
"""Function that runs the engine's forward on one micro-batch and returns the scalar loss."""
Harvest = Callable[[int, Tensor], None]
"""Function of a master partition's index and its averaged, unscaled, unclipped gradient."""


class ProbeBatches(Protocol):
    """Batches of sequences that probes read. A batch is the same sequences on any number of ranks.

    If losses are not means over all tokens of their micro-batch, `divisor(batch)` returns the number by which they
    divide the sum over tokens. `epochs`, if it is there, takes the place of `start.epochs`. `repeats`, if it is there,
    says whether all batches are the same.
    """

    def passes(self, batch: int) -> Sequence[Closure]:
        """Return this rank's micro-batches of probe batch `batch`, counted from 0; as many on every rank."""
        ...


def batches_of(probe: Closure | ProbeBatches) -> ProbeBatches:
    """Return batches to probe; a bare closure makes batches of the one micro-batch that it runs."""
    return _OneMicroBatch(probe) if callable(probe) else probe


def divisor_of(batches: ProbeBatches, batch: int) -> float | None:
    """Return the divisor of a batch's summed losses; None if it is the number of tokens."""
    divisor: Callable[[int], float | None] | None = getattr(batches, "divisor", None)
    return None if divisor is None else divisor(batch)


@dataclass(frozen=True)
class _OneMicroBatch:
    """Batches that are all the one micro-batch of a closure."""

    closure: Closure
    repeats = True

    def passes(self, batch: int) -> Sequence[Closure]:
        return (self.closure,)


_OPTIMIZER_SCALARS = ("overflow", "_global_grad_norm", "clip_grad", "_hp_optimizer_states_linked")
"""Attributes of DeepSpeed's optimizers that a step changes, beside the loss scaler."""


class ExtraPasses:
    """Extra passes on one engine that leave no trace in its training."""

    def __init__(self, layout: ShardLayout) -> None:
        self.layout = layout
        self.harvest: Harvest | None = None
        """While set, a step of the optimizer passes its gradients to this function and changes nothing."""
        self._holds_gradients = False
        """True while DeepSpeed holds gradients of extra passes: for good, if one of them has raised."""

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of a step, by which the engine divides every loss."""
        return int(self.layout.engine.gradient_accumulation_steps())

    @property
    def backward_scale(self) -> float:
        """Factor of dL/dy during a probe's backward pass."""
        return self.layout.loss_scale / self.accumulation

    def gradients(self, passes: Sequence[Closure], harvest: Harvest) -> bool:
        """Run forward and backward of every pass, and harvest the mean gradient of every master partition.

        Args:
            passes: closures, one for each micro-batch.
            harvest: function that gets the mean gradient over the passes.

        Returns:
            False if the gradients were not finite, so that DeepSpeed skipped the step and nothing was harvested.
        """
        engine = self.layout.engine
        optimizer = self.layout.optimizer
        harvested = False

        def on_gradient(index: int, gradient: Tensor) -> None:
            nonlocal harvested
            harvested = True
            share = self.accumulation / len(passes)
            harvest(index, gradient if share == 1 else gradient * share)

        with self._untraced():
            self.forget_gradients()
            # The engine divides by the accumulation steps, so that a probe overflows no sooner than training. It may
            # have another number of passes: `on_gradient` forms the mean over them.
            self._backward(passes, for_weights=True)
            self.harvest = on_gradient
            try:
                optimizer.step()
            finally:
                self.harvest = None
            optimizer.zero_grad()
            if optimizer is self.layout.inner:
                engine.zero_grad()
            self.forget_gradients()
            self._holds_gradients = False
        return harvested

    def require_finished(self) -> None:
        """Raise ForgeError if DeepSpeed still holds gradients of passes that an error has ended."""
        if self._holds_gradients:
            raise ForgeError(
                "a probe broke off with an error, and the engine holds gradients of it; make a new engine, and go back "
                "to a checkpoint by engine.load_checkpoint"
            )

    def activations(self, passes: Sequence[Closure]) -> None:
        """Run forward and backward of every pass with gradients of activations alone.

        Layer hooks get the same tensors as in `gradients`, bit for bit; they may be infinite or NaN. With
        ZeRO-3's leaf modules weights have gradients too: ZeRO-3 reduces these whether there are any or not.
        """
        engine = self.layout.engine
        if getattr(self.layout.optimizer, "leaf_parameters", None):
            self.gradients(passes, lambda _index, _gradient: None)
            return
        with self._untraced(), _without_weight_gradients(engine.module):
            # Stage 2 would reduce gradients that are not there.
            reduces = engine.enable_backward_allreduce
            engine.enable_backward_allreduce = False
            try:
                self._backward(passes, for_weights=False)
            finally:
                engine.enable_backward_allreduce = reduces

    def usable(self, *measured: Tensor) -> bool:
        """Return whether measured tensors are finite on all ranks. Collective, one reduction."""
        faults = torch.zeros((), device=self.layout.device)
        for values in measured:
            faults += (~values.isfinite()).any().to(faults.device)
        return bool((self.layout.all_reduce(faults) == 0).item())

    def forget_gradients(self) -> None:
        """Zero ZeRO-3's gradient buffer: a parameter that a step does not use would get the last step's gradient."""
        buffer = getattr(self.layout.optimizer, "grad_partitions_flat_buffer", None)
        if isinstance(buffer, Tensor):
            buffer.zero_()

    def loss(self, closure: Closure) -> Tensor:
        """Return the detached scalar loss of this rank's micro-batch, by a forward without a graph."""
        with self._untraced(), torch.no_grad():
            return closure().detach().float()

    def _backward(self, passes: Sequence[Closure], for_weights: bool) -> None:
        """Run forward and backward of every pass; the last one is a boundary of gradient accumulation.

        With `for_weights`, DeepSpeed holds gradients of weights from the first backward on.
        """
        engine = self.layout.engine
        for number, closure in enumerate(passes):
            engine.set_gradient_accumulation_boundary(number == len(passes) - 1)
            loss = closure()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"the probe returned {type(loss).__name__}, not a scalar loss with a graph; "
                    "pass a function like lambda: engine(**batch).loss"
                )
            self._holds_gradients |= for_weights
            engine.backward(loss)

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        """Restore counters, loss scale, hyperparameters and random state at the end; gradients are not clipped."""
        engine = self.layout.engine
        optimizer = self.layout.optimizer
        inner = self.layout.inner
        # What a pass changes.
        boundary = engine._is_gradient_accumulation_boundary
        scalars = {name: getattr(optimizer, name) for name in _OPTIMIZER_SCALARS if hasattr(optimizer, name)}
        scalers = [(holder, dict(holder.__dict__)) for holder in self.layout.loss_scalers()]
        hyperparameters: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if key != "params"} for group in inner.param_groups
        ]
        accelerator = get_accelerator()
        cpu_rng = torch.get_rng_state()
        device_rng = accelerator.get_rng_state()
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
            for group, values in zip(inner.param_groups, hyperparameters, strict=True):
                group.update(values)
            torch.set_rng_state(cpu_rng)
            accelerator.set_rng_state(device_rng)


@contextmanager
def _without_weight_gradients(model: Any) -> Iterator[None]:
    """Let no parameter require a gradient while active; the embedded tokens do, so that recomputed blocks have one."""
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
        layout: shard map of the engine.
        shard: this rank's part of the weight.
        ranges: (start, stop) of the weight on every rank.
        full: (n,) contribution of this rank to n consecutive elements, or all, of the weight; overwritten.
        first: index in the weight of the first of these elements.

    Returns:
        The range of the shard's elements that are summed, counted from the shard's first, and their sums.
    """
    numel = full.numel()

    def clip(element: int) -> int:
        """Return the index in `full` of an element of the weight, or of the nearer end."""
        return min(max(element, first), first + numel) - first

    own_part = slice(clip(shard.start), clip(shard.stop))
    before = max(first - shard.start, 0)
    in_shard = slice(before, before + own_part.stop - own_part.start)
    if layout.world_size == 1:
        return in_shard, full
    if layout.replicated:
        return in_shard, layout.all_reduce(full)
    # Equal parts, one a rank in order (ZeRO-3), are one reduce-scatter. A weight that one rank holds in full (stages 1
    # and 2) is not: it would be padded to `world_size` times its size.
    clipped = [(clip(start), clip(stop)) for start, stop in ranges]
    length = clipped[0][1] - clipped[0][0]
    padding = length * layout.world_size - numel
    if 0 <= padding < layout.world_size and all(
        (start, stop) == (min(rank * length, numel), min((rank + 1) * length, numel))
        for rank, (start, stop) in enumerate(clipped)
    ):
        padded = torch.nn.functional.pad(full, (0, padding)) if padding else full
        received = full.new_empty(length)
        layout.reduce_scatter(received, padded)
        return in_shard, received[: own_part.stop - own_part.start]
    # Parts of other sizes are reduced one by one.
    for owner, (start, stop) in enumerate(clipped):
        if stop > start:
            layout.reduce(full[start:stop], owner)
    return in_shard, full[own_part]
