"""One decoder block of the start: its first mask, then Adam on what is kept, against the dense block's own output.

Two streams of hidden states go from block to block. The dense one gives the targets: what the dense block makes of its
dense inputs. The pruned one has the inputs that the block will get in the pruned model, so that errors of the blocks
before it are made up for, too. Targets are computed before anything is changed, so no teacher model is needed.

Legend of shape suffixes: B sequences of a micro-batch, S their tokens, H hidden size, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparseforge_ds.config import ReconstructionConfig, StartConfig
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.start.annealing import Annealing
from sparseforge_ds.start.first_mask import InputMoments, Reduce, choose_by_score, mask_for, reconstruct_weight

Call = Callable[[int, Tensor], Tensor]
"""(number of a micro-batch, hidden states (B, S, H) in fp32) -> what the block makes of them, (B, S, H)."""
Stream = MutableSequence[Tensor]
"""(B, S, H) hidden states of every micro-batch, in any dtype; a list will do."""

BETAS = (0.9, 0.95)
EPS = 1e-12
"""Adam's epsilon: gradients of a block's error are small numbers where a few hidden states are huge."""
MEASURED = 16
"""Micro-batches, spread over all, on which the error of a block is measured."""
BACKWARD = 3
"""Work of a forward and a backward pass, in forward passes."""


@dataclass
class SolvedBlock:
    """The result of a block: its masks and its errors."""

    masks: dict[str, Tensor]
    """Members that survive, by the weight's name inside the block: bool in its shape."""
    error_before: float = math.nan
    """Error of the block with its first mask, as a share of the dense block's output: the mean over tokens of squared
    distance by squared length. NaN where the mask is found by training."""
    error: float = math.nan
    """The same at the end."""
    few_tokens: dict[str, int] = field(default_factory=dict)
    """Experts of a weight that saw fewer tokens than they have inputs: they keep their first mask and dense values."""


def no_reduce(_tensors: list[Tensor]) -> None:
    """Sum over the only rank."""


def passes_of(settings: StartConfig) -> int:
    """Return the forward passes over all micro-batches that `solve_block` reports as its work."""
    return 3 + BACKWARD * settings.epochs


def solve_block(
    block: nn.Module,
    dense: Stream,
    pruned: Stream,
    call: Call,
    weights: Sequence[PrunableWeight],
    pattern: Pattern,
    settings: StartConfig,
    *,
    reduce: Reduce = no_reduce,
    per_step: int = 1,
    ranks: int = 1,
    seed: int = 0,
    stored: torch.dtype = torch.float32,
    progress: Callable[[int], object] = lambda _passes: None,
    reconstruction: ReconstructionConfig | None = None,
) -> SolvedBlock:
    """Prune a decoder block, train what is kept, and take both streams behind it. Collective where `reduce` is.

    Args:
        block: a plain module in fp32 with whole, dense parameters; at the end it holds the pruned ones. It is left in
            evaluation mode, its parameters without gradients.
        dense: inputs of the block in the dense model; its outputs at the end.
        pruned: inputs of the block in the model as it is pruned so far; its outputs at the end.
        call: runs the block, under autocast where that is wanted.
        weights: prunable weights by names inside the block; where there are none, only the streams move.
        pattern: how many members of a group survive.
        settings: of the start; the streams are its `tokens`, and `per_step` is its `batch`.
        reduce: sums tensors over the ranks, in place. Every rank has equally many micro-batches.
        per_step: micro-batches of this rank in an optimizer step.
        ranks: over which `reduce` sums.
        seed: of the order in which steps read their micro-batches; the same on all ranks.
        stored: dtype in which parameters will be stored, and to which they are rounded at the end.
        progress: is told of the work that was done, in forward passes of one micro-batch; see `passes_of`.
        reconstruction: how SparseGPT chooses and updates weights; None: with the damping of `settings`.

    Raises:
        ValueError: these weights cannot have that mask, or inputs are not finite.
    """
    return _Solver(
        block,
        dense,
        pruned,
        call,
        weights,
        pattern,
        settings,
        reduce,
        per_step,
        ranks,
        seed,
        stored,
        progress,
        reconstruction,
    ).solve()


@dataclass
class _Solver:
    """A block on its way; fields as the arguments of `solve_block`."""

    block: nn.Module
    dense: Stream
    pruned: Stream
    call: Call
    weights: Sequence[PrunableWeight]
    pattern: Pattern
    settings: StartConfig
    reduce: Reduce
    per_step: int
    ranks: int
    seed: int
    stored: torch.dtype
    progress: Callable[[int], object]
    reconstruction: ReconstructionConfig | None

    def solve(self) -> SolvedBlock:
        self.block.eval().requires_grad_(False)
        # The dense stream moves on while the block is dense: from here on it holds the targets.
        self._advance(self.dense)
        if not self.weights:
            self._advance(self.pruned)
            return SolvedBlock({})
        how = mask_for(self.settings, self.weights, self.pattern)
        moments = self._measure_inputs(how)
        few = self._few_tokens(moments)
        solved = SolvedBlock({}, few_tokens={name: int(some_E.sum()) for name, some_E in few.items()})
        if how == "annealed":
            solved.masks = self._train(None, few)
        else:
            masks = self._first_masks(how, moments)
            del moments
            solved.error_before = self._error()
            solved.masks = self._train(masks, few) if self.settings.epochs else masks
        for parameter in self.block.parameters():
            parameter.data.copy_(parameter.data.to(self.stored))
        solved.error = self._error()
        self._advance(self.pruned)
        return solved

    @property
    def _device(self) -> torch.device:
        return next(self.block.parameters()).device

    @torch.no_grad()
    def _advance(self, stream: Stream) -> None:
        """Replace every input of the block by its output."""
        for number in range(len(stream)):
            stream[number] = self.call(number, stream[number].float())
            self.progress(1)

    def _measure_inputs(self, how: str) -> InputMoments:
        """Measure the inputs of the weights in the pruned stream; a pass is made only where something needs it."""
        moments = InputMoments(self.block, self.weights, full=how == "sparsegpt")
        needed = how in ("sparsegpt", "wanda") or any(weight.experts for weight in self.weights)

        def passes() -> Iterator[None]:
            for number in range(len(self.pruned)):
                self.call(number, self.pruned[number].float())
                self.progress(1)
                yield

        if needed:
            moments.measure(passes(), self.reduce)
            moments.require_finite()
        else:
            self.progress(len(self.pruned))
        return moments

    def _few_tokens(self, moments: InputMoments) -> dict[str, Tensor]:
        """(E,) bool of every weight of experts: which of them saw fewer tokens than they have inputs."""
        return {
            weight.name: moments.tokens[weight.name] < weight.shape[weight.input_axis]
            for weight in self.weights
            if weight.experts
        }

    @torch.no_grad()
    def _first_masks(self, how: str, moments: InputMoments) -> dict[str, Tensor]:
        masks = {}
        for weight in self.weights:
            value = self.block.get_parameter(weight.name).data
            if how == "sparsegpt":
                by = self.reconstruction or ReconstructionConfig(damping=self.settings.damping)
                updated, kept = reconstruct_weight(weight, value, moments.of(weight.name), self.pattern, by)
                value.copy_(updated if by.update_weights else torch.where(kept, value, 0.0))
            else:
                squares = moments.of(weight.name) if how == "wanda" else None
                kept = choose_by_score(weight, value, self.pattern, squares)
                value.copy_(torch.where(kept, value, 0.0))
            masks[weight.name] = kept
        return masks

    def _train(self, masks: dict[str, Tensor] | None, few: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run Adam on what is kept, and return the masks. Where there are none yet, they are annealed in the first part
        of the steps."""
        settings, count = self.settings, len(self.pruned)
        steps_an_epoch = max(1, count // self.per_step)
        steps = settings.epochs * steps_an_epoch
        matrices = [self.block.get_parameter(weight.name) for weight in self.weights]
        parameters = [*matrices, *(self._vectors() if settings.norms else [])]
        squares = torch.stack([matrix.detach().square().sum() for matrix in matrices])
        rate = settings.rate * math.sqrt(float(squares.sum()) / sum(matrix.numel() for matrix in matrices))
        annealing = None if masks else Annealing(self.block, self.weights, self.pattern, steps, few)
        trainable = self._trainable(masks, few)
        optimizer = torch.optim.Adam(parameters, lr=rate, betas=BETAS, eps=EPS, fused=True)
        generator = torch.Generator().manual_seed(self.seed)
        order: list[int] = []
        for parameter in parameters:
            parameter.requires_grad_(True)
        for step in range(steps):
            # A step reads consecutive micro-batches, which ranks divide among them: it is the same on any number.
            order = order or torch.randperm(steps_an_epoch, generator=generator).tolist()
            first = order.pop() * self.per_step
            with nullcontext() if annealing is None else annealing.listening():
                for micro_batch in range(first, min(first + self.per_step, count)):
                    self._backward(micro_batch)
            # All ranks make the same step, by the sum of their gradients.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            self.reduce(gradients)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            torch._foreach_mul_(gradients[: len(matrices)], trainable)
            for group in optimizer.param_groups:
                group["lr"] = 0.5 * rate * (1 + math.cos(math.pi * step / steps))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if annealing is not None and (frozen := annealing.after_step(step + 1, self.reduce)):
                masks, annealing = frozen, None
                trainable = self._trainable(masks, few)
        assert masks is not None
        self.block.requires_grad_(False)
        for name, kept in masks.items():
            value = self.block.get_parameter(name).data
            value.copy_(torch.where(kept, value, 0.0))
        return masks

    def _vectors(self) -> list[nn.Parameter]:
        """Gains and biases of the norms, and biases of the layers that are pruned."""
        pruned = {weight.module for weight in self.weights}
        return [
            parameter
            for name, parameter in self.block.named_parameters()
            if (owner := name.rpartition(".")[0]) in pruned
            and name.endswith("bias")
            or "norm" in type(self.block.get_submodule(owner)).__name__.lower()
            and parameter.dim() == 1
        ]

    def _trainable(self, masks: dict[str, Tensor] | None, few: dict[str, Tensor]) -> list[Tensor]:
        """1 for each weight that Adam moves, 0 for the others; in the order of `weights`."""
        factors = []
        for weight in self.weights:
            value = self.block.get_parameter(weight.name)
            factor = torch.ones_like(value) if masks is None else masks[weight.name].to(value.dtype)
            if weight.name in few:
                factor = factor * ~few[weight.name].view(-1, *[1] * (value.dim() - 1))
            factors.append(factor)
        return factors

    def _backward(self, number: int) -> None:
        """Add the gradient of one micro-batch's error."""
        with torch.enable_grad():
            output = self.call(number, self.pruned[number].float())
            (_relative_errors(output, self.dense[number]).mean() / (self.per_step * self.ranks)).backward()
        self.progress(BACKWARD)

    @torch.no_grad()
    def _error(self) -> float:
        """`SolvedBlock.error` of the block as it is."""
        count = len(self.pruned)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for number in sorted({i * count // MEASURED for i in range(MEASURED)}):
            errors = _relative_errors(self.call(number, self.pruned[number].float()), self.dense[number])
            sums += torch.stack([errors.sum(), errors.new_tensor(errors.numel())])
        self.reduce([sums])
        return float(sums[0] / sums[1])


def _relative_errors(output_BSH: Tensor, target_BSH: Tensor) -> Tensor:
    """(B, S) squared distance of each token's hidden states, by the squared length of what they should be.

    By tokens, because a few hidden states are a hundred times as long as all others, and the norm behind makes all
    equally important.
    """
    target_BSH = target_BSH.float()
    distance_BS = (output_BSH.float() - target_BSH).square().sum(-1)
    return distance_BS / target_BSH.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
