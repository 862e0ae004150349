"""Pruning of one decoder block: first masks, then Adam on masks and weights, against the dense block's own output.

Two streams of hidden states go from block to block. The dense stream gives the targets: the outputs of the dense block
for its inputs in the dense model. The pruned stream has the inputs that the block gets in the pruned model, so that it
also makes up for errors of the blocks before it. Targets are computed before anything is changed, so no teacher model
is needed.

Legend of shape suffixes: B sequences of a micro-batch, S their tokens, H hidden size, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparseforge_ds.config import BlockStartConfig
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.start.annealing import Annealing
from sparseforge_ds.start.first_mask import InputMoments, Reduce, choose_by_score, mask_for, reconstruct_weight

Call = Callable[[int, Tensor], Tensor]
"""Function of the number of a micro-batch and its hidden states (B, S, H) in fp32 that returns the block's output."""
Stream = MutableSequence[Tensor]
"""Hidden states (B, S, H) of every micro-batch, in any dtype, such as a list."""

BETAS = (0.9, 0.95)
EPS = 1e-12
"""Adam's epsilon: gradients of a block's error are tiny if a few hidden states are huge."""
MEASURED = 16
"""Micro-batches, spread over all, on which the error of a block is measured."""
_LEAST_OF_A_GAIN = 0.2
"""Smallest rate of a norm's gain, relative to the mean of the matrices' rates."""
BACKWARD = 3
"""Work of a forward and a backward pass, in forward passes."""


_NOT_FINITE = (
    "the outputs of the block are not finite in the model as it is pruned so far; compute in bf16 or fp32, or take a "
    "model without infinite weights"
)


@dataclass
class SolvedBlock:
    """Result of a block: its masks and its errors."""

    masks: dict[str, Tensor]
    """Mask of each weight, bool in its shape, by its name inside the block."""
    error_before: float = math.nan
    """Error of the block with its first masks: mean over tokens of |output - target|^2 / |target|^2, target the dense
    block's output, on at most `MEASURED` micro-batches. NaN if nothing is pruned."""
    error: float = math.nan
    """Error of the block at the end."""
    few_tokens: dict[str, int] = field(default_factory=dict)
    """Number of experts of a weight that saw fewer tokens than they have inputs. They keep their first
    masks, and the values that these came with."""
    steps: int = 0
    """Number of Adam steps that trained the block."""

    def warnings(self) -> list[str]:
        """Return sentences about weights that training did not improve; usually none."""
        sentences = [
            f"{weight}: {experts} of its experts saw fewer tokens than they have inputs, and keep their first masks "
            "and values; give more tokens"
            for weight, experts in self.few_tokens.items()
            if experts and self.steps
        ]
        if self.steps and self.error > self.error_before:
            sentences.append(
                f"{self.steps} steps have raised its error from {self.error_before:.3g} to {self.error:.3g}; give it "
                "more tokens or epochs, or a lower rate"
            )
        return sentences


def no_reduce(_tensors: list[Tensor]) -> None:
    """Leave tensors as they are: the sum over a single rank."""


def passes_of(settings: BlockStartConfig) -> int:
    """Return the forward passes over all micro-batches that `solve_block` reports as its work."""
    return 3 + BACKWARD * settings.epochs


@dataclass(frozen=True)
class SolveOptions:
    """Settings of `solve_block` about ranks, dtypes and progress."""

    reduce: Reduce = no_reduce
    """Function that sums tensors over the ranks, in place. Every rank has equally many micro-batches."""
    per_step: int = 1
    """Micro-batches of this rank in an optimizer step."""
    ranks: int = 1
    """Number of ranks that `reduce` sums over."""
    seed: int = 0
    """Seed of the order in which steps read their micro-batches; the same on all ranks."""
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes that parameters are rounded to at the end, by name in the block: those that they will be stored in."""
    progress: Callable[[int], object] = lambda _passes: None
    """Function that is told of the work that was done, in forward passes of one micro-batch; see `passes_of`."""
    is_trained: Callable[[str], bool] = lambda _name: True
    """Function that says of a norm or bias, by its name in the block, if it may be trained."""


def solve_block(
    block: nn.Module,
    dense: Stream,
    pruned: Stream,
    call: Call,
    weights: Sequence[PrunableWeight],
    pattern: Pattern,
    settings: BlockStartConfig,
    options: SolveOptions = SolveOptions(),
) -> SolvedBlock:
    """Prune a decoder block, train the kept weights, and move both streams behind it. Collective if `reduce` is.

    Args:
        block: a plain module in fp32 with whole, dense parameters; at the end it has the pruned ones. It is left in
            evaluation mode, its parameters without gradients.
        dense: inputs of the block in the dense model; its outputs at the end.
        pruned: inputs of the block in the model as it is pruned so far; its outputs at the end.
        call: runs the block, under autocast if that is wanted.
        weights: prunable weights by names inside the block; without any, only the streams move.
        pattern: of the masks.
        settings: of the start; the streams are its `tokens`, and `per_step` is its `batch`.
        options: about ranks, dtypes and progress.

    Raises:
        ValueError: these weights cannot have that mask, or inputs are not finite.
    """
    return _Solver(block, dense, pruned, call, weights, pattern, settings, options).solve()


@dataclass
class _Solver:
    """One call of `solve_block`, whose arguments are the fields."""

    block: nn.Module
    dense: Stream
    pruned: Stream
    call: Call
    weights: Sequence[PrunableWeight]
    pattern: Pattern
    settings: BlockStartConfig
    options: SolveOptions

    def solve(self) -> SolvedBlock:
        self.block.eval().requires_grad_(False)
        # What makes no sense is refused before anything is computed.
        kind = mask_for(self.settings, self.weights, self.pattern) if self.weights else ""
        # The dense stream moves on while the block is dense: from here on it has the targets.
        self._advance(self.dense)
        if not self.weights:
            self._advance(self.pruned)
            return SolvedBlock({})
        # Inputs decide about the first mask, and about experts with too few tokens for more.
        moments = self._measure_inputs(kind)
        starved = self._starved_experts(moments)
        solved = SolvedBlock({}, few_tokens={name: int(starved_E.sum()) for name, starved_E in starved.items()})
        # First masks come before training, and move in its first part.
        solved.masks = self._first_masks(kind, moments)
        del moments
        solved.error_before = self._error()
        if not math.isfinite(solved.error_before):
            raise ValueError(_NOT_FINITE)
        if self.settings.epochs:
            solved.steps = self._steps
            solved.masks = self._train(solved.masks, starved)
        # The pruned stream moves on through the weights as they will be stored.
        for name, dtype in self.options.stored.items():
            parameter = self.block.get_parameter(name)
            parameter.data.copy_(parameter.data.to(dtype))
        solved.error = self._error()
        self._require_closer(solved)
        self._advance(self.pruned)
        return solved

    def _require_closer(self, solved: SolvedBlock) -> None:
        """Raise ValueError, on all ranks, where training has diverged, or rounding has made the block infinite."""
        before = solved.error_before
        # An output of zeros has an error of 1.
        if math.isfinite(solved.error) and (solved.error <= max(1.0, before) or not self.settings.epochs):
            return
        if not self.settings.epochs:
            raise ValueError(_NOT_FINITE)
        raise ValueError(
            f"training has raised the error of the block from {before:.3g} to {solved.error:.3g}; take a rate below "
            f"{self.settings.rate:g} (start.rate, or --rate of prune)"
        )

    @property
    def _device(self) -> torch.device:
        return next(self.block.parameters()).device

    @property
    def _steps(self) -> int:
        """Number of Adam steps of the block; the last one of an epoch may be shorter."""
        return self.settings.epochs * math.ceil(len(self.pruned) / self.options.per_step)

    @torch.no_grad()
    def _advance(self, stream: Stream) -> None:
        """Replace every input of the block by its output."""
        for number in range(len(stream)):
            stream[number] = self.call(number, stream[number].float())
            self.options.progress(1)

    def _measure_inputs(self, kind: str) -> InputMoments:
        """Measure the inputs of the weights in the pruned stream, if the mask or an expert needs them."""
        moments = InputMoments(self.block, self.weights, full=kind == "sparsegpt")
        needed = kind in ("sparsegpt", "wanda") or any(weight.experts for weight in self.weights)

        def passes() -> Iterator[None]:
            for number in range(len(self.pruned)):
                self.call(number, self.pruned[number].float())
                self.options.progress(1)
                yield

        if needed:
            moments.measure(passes(), self.options.reduce)
            moments.require_finite()
        else:
            self.options.progress(len(self.pruned))
        return moments

    def _starved_experts(self, moments: InputMoments) -> dict[str, Tensor]:
        """Return for every weight of experts which of them saw fewer tokens than they have inputs, (E,) bool."""
        return {
            weight.name: moments.tokens[weight.name] < weight.shape[weight.input_axis]
            for weight in self.weights
            if weight.experts
        }

    @torch.no_grad()
    def _first_masks(self, kind: str, moments: InputMoments) -> dict[str, Tensor]:
        """Choose the masks without training, and set pruned weights to 0."""
        masks = {}
        for weight in self.weights:
            value = self.block.get_parameter(weight.name).data
            if kind == "sparsegpt":
                input_moments = moments.moments_for(weight.name)
                updated, kept = reconstruct_weight(weight, value, input_moments, self.pattern, self.settings.damping)
                value.copy_(updated)
            else:
                squares = moments.moments_for(weight.name) if kind == "wanda" else None
                kept = choose_by_score(weight, value, self.pattern, squares)
                value.copy_(torch.where(kept, value, 0.0))
            masks[weight.name] = kept
        return masks

    def _train(self, masks: dict[str, Tensor], starved: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run Adam on the weights, and return the masks.

        Args:
            masks: the first masks, which are soft in the first part of the steps.
            starved: result of `_starved_experts`.
        """
        settings = self.settings
        steps = self._steps
        matrices = [self.block.get_parameter(weight.name) for weight in self.weights]
        vectors = self._vectors()
        parameters = [*matrices, *vectors.values()]
        annealing = None
        if soft_steps := settings.soft_steps(steps):
            annealing = Annealing(self.block, self.weights, self.pattern, soft_steps, masks, starved)
        # Experts with few tokens keep their biases, too.
        fixed_vectors = [self._fixed_bias(name, vector, starved) for name, vector in vectors.items()]
        fixed = self._fixed(None if annealing else masks, starved) + fixed_vectors
        # Adam's steps are as large as the rate.
        peaks = self._rates(matrices, vectors)
        param_groups = [{"params": [p], "lr": peak} for p, peak in zip(parameters, peaks, strict=True)]
        optimizer = torch.optim.Adam(param_groups, betas=BETAS, eps=EPS, fused=True)
        generator = torch.Generator().manual_seed(self.options.seed)
        order: list[int] = []
        for parameter in parameters:
            parameter.requires_grad_(True)
        for step in range(steps):
            # A step reads consecutive micro-batches, so it reads the same sequences on any number of ranks.
            order = order or torch.randperm(steps // settings.epochs, generator=generator).tolist()
            first = order.pop() * self.options.per_step
            with nullcontext() if annealing is None else annealing.collect_sums():
                for micro_batch in range(first, min(first + self.options.per_step, len(self.pruned))):
                    self._backward(micro_batch)
            # All ranks take the same step, with the sum of their gradients.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            self.options.reduce(gradients)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for gradient, fixed_elements in zip(gradients, fixed, strict=True):
                if fixed_elements is not None:
                    gradient.masked_fill_(fixed_elements, 0.0)
            # The rate falls along a cosine.
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = 0.5 * peak * (1 + math.cos(math.pi * step / steps))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # Soft masks move, until they are frozen.
            if annealing is not None and (frozen := annealing.after_step(step + 1, self.options.reduce)):
                masks = frozen
                annealing = None
                fixed_matrices = self._fixed(masks, starved)
                fixed = fixed_matrices + fixed_vectors
                # What is pruned becomes 0, and Adam's momentum of the soft phase does not move it away again.
                for matrix, kept, fixed_elements in zip(matrices, masks.values(), fixed_matrices, strict=True):
                    matrix.data.masked_fill_(~kept, 0.0)
                    optimizer.state[matrix]["exp_avg"].masked_fill_(fixed_elements, 0.0)
        self.block.requires_grad_(False)
        return masks

    def _rates(self, matrices: Sequence[Tensor], vectors: Mapping[str, Tensor]) -> list[float]:
        """Return the largest learning rate of each matrix and vector, relative to its own size.

        Matrices of one block differ in size by a factor of ten where gains of norms are folded into some of them. Gains
        take steps of a fifth to the whole of what matrices take on average: some norms store them as a distance from 1,
        which says nothing of their size. Biases, which may all be 0, take that average.
        """
        sizes = torch.stack([matrix.detach().float().square().mean().sqrt() for matrix in matrices])
        mean = sizes.mean()
        of_vectors = [
            mean
            if name.endswith("bias")
            else vector.detach().float().square().mean().sqrt().clamp(_LEAST_OF_A_GAIN * mean, mean)
            for name, vector in vectors.items()
        ]
        all_sizes = torch.stack([*sizes, *of_vectors])
        rates: list[float] = (self.settings.rate * torch.where(all_sizes > 0, all_sizes, mean)).tolist()
        return rates

    def _vectors(self) -> dict[str, nn.Parameter]:
        """Return gains and biases of the norms, and biases of the pruned layers, by name, which may be trained."""
        pruned_modules = {weight.module for weight in self.weights}
        return {
            name: parameter
            for name, parameter in self.block.named_parameters()
            if self.options.is_trained(name)
            and (
                (owner := name.rpartition(".")[0]) in pruned_modules
                and name.endswith("bias")
                or "norm" in type(self.block.get_submodule(owner)).__name__.lower()
                and parameter.dim() == 1
            )
        }

    def _fixed_bias(self, name: str, bias: Tensor, starved: dict[str, Tensor]) -> Tensor | None:
        """Return which elements of a norm or bias Adam does not move: those of experts with few tokens."""
        owner, _, leaf = name.rpartition(".")
        of_weight = f"{owner}.weight" if leaf == "bias" else name.removesuffix("_bias")
        if of_weight not in starved:
            return None
        return starved[of_weight].view(-1, *[1] * (bias.dim() - 1))

    def _fixed(self, masks: dict[str, Tensor] | None, starved: dict[str, Tensor]) -> list[Tensor | None]:
        """Return which elements Adam does not move, bool or None, in the order of `weights`."""
        fixed: list[Tensor | None] = []
        for weight in self.weights:
            removed = None if masks is None else ~masks[weight.name]
            if weight.name in starved:
                starved_experts = starved[weight.name].view(-1, *[1] * (len(weight.shape) - 1))
                removed = starved_experts if removed is None else removed | starved_experts
            fixed.append(removed)
        return fixed

    def _backward(self, number: int) -> None:
        """Add the gradient of one micro-batch's error; all count alike, also in a shorter step."""
        with torch.enable_grad():
            output = self.call(number, self.pruned[number].float())
            loss = _relative_errors(output, self.dense[number]).mean()
            (loss / (self.options.per_step * self.options.ranks)).backward()
        self.options.progress(BACKWARD)

    @torch.no_grad()
    def _error(self) -> float:
        """Measure `SolvedBlock.error` of the block as it is."""
        count = len(self.pruned)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for number in sorted({i * count // MEASURED for i in range(MEASURED)}):
            errors = _relative_errors(self.call(number, self.pruned[number].float()), self.dense[number])
            sums += torch.stack([errors.sum(), errors.new_tensor(errors.numel())])
        self.options.reduce([sums])
        return float(sums[0] / sums[1])


def _relative_errors(output_BSH: Tensor, target_BSH: Tensor) -> Tensor:
    """Return the squared distance of each token's hidden states from the target, by its squared length, (B, S).

    Each token counts by its own length: a few hidden states are a hundred times as long as all others, and the norm
    behind them makes all equally important.
    """
    target_BSH = target_BSH.float()
    distance_BS = (output_BSH.float() - target_BSH).square().sum(-1)
    return distance_BS / target_BSH.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
