"""First masks of a decoder block: SparseGPT's (arXiv 2301.00774), Wanda's (arXiv 2306.11695), or magnitude.

Legend of shape suffixes: T tokens, S rows sorted by expert, E experts, O outputs, I inputs, G groups, M members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseforge_ds.config.block_sections import BlockStartConfig, BlockStartMask
from sparseforge_ds.mask.kernels.groups import survivors
from sparseforge_ds.mask.pattern import NM, Pattern
from sparseforge_ds.mask.reconstruct import reconstruct
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.zero.expert_hooks import expert_tokens, why_unhookable
from sparseforge_ds.zero.layer_hooks import layer_inputs

UNSEEN_INPUT = 1e-6
"""Sum of squares of an input that is 0 for every token, relative to the least other one of its expert."""

Reduce = Callable[[list[Tensor]], None]
"""Function that sums tensors over the ranks in place, in an order that does not depend on which rank comes first."""


def mask_for(settings: BlockStartConfig, weights: Sequence[PrunableWeight], pattern: Pattern) -> BlockStartMask:
    """Return the kind of mask of a model or a block: `settings.mask`, or the default for its weights.

    Raises:
        ValueError: these weights, or this pattern, cannot have such a mask, or it does not use `settings.damping`.
    """
    fused = next((weight.name for weight in weights if len(weight.shape) == 3), None)
    # Why SparseGPT's masks are impossible, if they are.
    obstacle = None if isinstance(pattern, NM) else f"pattern {pattern} is not n:m"
    obstacle = obstacle if fused is None else f"{fused} is of fused experts"
    kind = settings.mask or ("sparsegpt" if obstacle is None else "wanda")
    if kind == "sparsegpt" and obstacle is not None:
        raise ValueError(
            f'start.mask "sparsegpt" (--mask of prune) needs an n:m pattern and the inputs of a linear layer for every '
            f'weight, and {obstacle}; use "wanda" or "magnitude"'
        )
    if kind == "wanda" and settings.mask is None and settings.damping != BlockStartConfig.damping:
        raise ValueError(
            f"start.damping = {settings.damping:g}: the first masks are Wanda's here, which do not use it, because "
            f"{obstacle}; leave it out"
        )
    return kind


class InputMoments:
    """Second moments of the inputs of a block's weights in the pruned stream, and the tokens that each expert saw."""

    def __init__(self, block: nn.Module, weights: Sequence[PrunableWeight], full: bool) -> None:
        """Begin with zeros.

        Args:
            block: the decoder block.
            weights: its prunable weights, by names inside the block.
            full: True for whole second moments, (I, I) of each weight; False for their diagonals, (E, I).

        Raises:
            ValueError: the inputs of a weight cannot be seen.
        """
        self._full = full
        self._layers: dict[str, nn.Module] = {}
        self._fused: dict[str, nn.Module] = {}
        self._inputs: dict[str, int] = {}
        self.moments: dict[str, Tensor] = {}
        """Sums by name of a weight; of several layers with the same input, the first has them."""
        self.tokens: dict[str, Tensor] = {}
        """Number of tokens, (E,) of each weight; E is 1 unless experts are fused."""
        self._same_input: dict[str, str] = {}
        """Name of the weight that has the moments of another one."""
        self._inputs_in_pass: dict[tuple[int, torch.Size, tuple[int, ...], int], tuple[str, Tensor]] = {}
        """First weight that read an input in this pass, and the input, by its place in memory."""
        device = next(block.parameters()).device
        # Sums of diagonals have a fixed shape; whole moments are made when the first input comes.
        for weight in weights:
            module = block.get_submodule(weight.module)
            fused = len(weight.shape) == 3
            assert not (fused and full), weight.name
            if fused and (cause := why_unhookable(module)) is not None:
                raise ValueError(f"{weight.name}: the inputs of its experts cannot be seen: the module {cause}")
            if fused:
                self._fused[weight.module] = module
            else:
                self._layers[weight.name] = module
            experts = weight.shape[0] if fused else 1
            self.tokens[weight.name] = torch.zeros(experts, device=device)
            inputs = self._inputs[weight.name] = weight.shape[weight.input_axis]
            if not full:
                self.moments[weight.name] = torch.zeros(experts, inputs, device=device)
            elif weight.experts:  # perhaps no rank has a token for it
                self.moments[weight.name] = torch.zeros(inputs, inputs, device=device)

    @torch.no_grad()
    def measure(self, passes: Iterable[None], reduce: Reduce) -> None:
        """Sum the inputs of all passes, over all ranks.

        Args:
            passes: runs the block once before each element that it yields.
            reduce: sums tensors over the ranks, in place.
        """
        with (
            layer_inputs(self._layers, self._add_layer),
            expert_tokens(self._fused, self._add_experts, gradients=False),
        ):
            for _ in passes:
                self._inputs_in_pass.clear()
        # A layer without a token has zeros, as all ranks must sum the same tensors.
        for name in self._layers:
            if self._full and name not in self._same_input and name not in self.moments:
                inputs = self._inputs[name]
                self.moments[name] = torch.zeros(inputs, inputs, device=self.tokens[name].device)
        reduce([*self.moments.values(), *self.tokens.values()])

    def moments_for(self, name: str) -> Tensor:
        """Return the moments of a weight: (I, I) or (E, I). Layers with the same input have the same tensor."""
        return self.moments[self._same_input.get(name, name)]

    def require_finite(self) -> None:
        """Raise ValueError for an input that is not finite."""
        finite = [value.isfinite().all() for value in self.moments.values()]
        is_finite = torch.stack(finite).tolist() if finite else []  # one wait for the device
        if broken := [name for name, fine in zip(self.moments, is_finite, strict=True) if not fine]:
            raise ValueError(
                f"the inputs of {broken[0]} are not finite in the model as it is pruned so far; compute in bf16 or "
                "fp32, or take a model without infinite weights"
            )

    def _add_layer(self, name: str, input_TI: Tensor) -> None:
        """Add the tokens of a linear layer."""
        self.tokens[name] += len(input_TI)
        if not self._full:
            self.moments[name] += input_TI.float().square().sum(0)
            return
        if name in self._same_input:
            return
        # q, k and v read the same tensor, and so do gate and up: one sum serves them all.
        if name not in self.moments:
            key = (input_TI.data_ptr(), input_TI.shape, input_TI.stride(), input_TI._version)
            if key in self._inputs_in_pass:
                self._same_input[name] = self._inputs_in_pass[key][0]
                return
            # The reference keeps the input's memory from being used again in this pass.
            self._inputs_in_pass[key] = (name, input_TI)
            self.moments[name] = input_TI.new_zeros(input_TI.shape[1], input_TI.shape[1], dtype=torch.float32)
        value_TI = input_TI.float()
        self.moments[name].addmm_(value_TI.t(), value_TI)

    def _add_experts(
        self, layer: str, parameter: str, _grad: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
    ) -> None:
        """Add the tokens of a layer's fused experts."""
        name = f"{layer}.{parameter}"
        if name not in self.moments:
            return
        # A column of ones counts the tokens.
        square_SI = F.pad(input_SI.float().square(), (0, 1), value=1.0)
        length_E = torch.diff(stop_E, prepend=stop_E.new_zeros(1)).long()
        sums_EI = torch.segment_reduce(square_SI, "sum", lengths=length_E, axis=0, unsafe=True)
        self.moments[name] += sums_EI[:, :-1]
        self.tokens[name] += sums_EI[:, -1]


@torch.no_grad()
def choose_by_score(weight: PrunableWeight, value: Tensor, pattern: Pattern, square_EI: Tensor | None) -> Tensor:
    """Return the mask of a weight by magnitude, or with `square_EI` by Wanda's score.

    Args:
        weight: its shape and input axis are used.
        value: its values, in its shape.
        pattern: of the mask.
        square_EI: sums of squared inputs, of each expert or of all tokens; None for magnitude. An input that
            is 0 counts as `UNSEEN_INPUT` says, so that magnitude decides among such, and in an unseen expert.

    Returns:
        bool in the weight's shape.
    """
    score = value.float().square()  # a pattern of pairs adds scores up
    if square_EI is not None:
        # Far below the least input that occurred: above 0, where scores would tie and positions decide.
        least_E1 = torch.where(square_EI > 0, square_EI, math.inf).amin(dim=1, keepdim=True)
        floor_E1 = torch.where(least_E1.isinf(), 1.0, least_E1 * UNSEEN_INPUT)
        square_EI = torch.where(square_EI > 0, square_EI, floor_E1)
        by_input = square_EI[:, None] if weight.input_axis == -1 else square_EI[:, :, None]
        score = score.view(len(square_EI), *weight.shape[-2:]) * by_input
    kept_GM = survivors(pattern.to_groups(score.reshape(-1), weight.shape, weight.input_axis), pattern)
    return pattern.from_groups(kept_GM, weight.shape, weight.input_axis).view(weight.shape)


@torch.no_grad()
def reconstruct_weight(
    weight: PrunableWeight, value: Tensor, moments_II: Tensor, pattern: Pattern, damping: float
) -> tuple[Tensor, Tensor]:
    """Return SparseGPT's weights and mask of one linear layer, both in the weight's shape.

    Raises:
        ValueError: the inputs do not span the columns of the layer.
    """
    assert isinstance(pattern, NM)
    transposed = weight.input_axis == -2
    value_OI = (value.t() if transposed else value).float().contiguous()
    try:
        updated_OI, kept_OI = reconstruct(value_OI, moments_II, pattern.n, pattern.m, damping)
    except torch.linalg.LinAlgError:
        raise ValueError(
            f'mask "sparsegpt": the inputs of {weight.name} do not span its columns, and a damping of {damping:g} is '
            'too little to make up for it; use more tokens, or in a run "start": {"mask": "sparsegpt", "epochs": 0, '
            f'"damping": {10 * damping:g}}}'
        ) from None
    return (updated_OI.t(), kept_OI.t()) if transposed else (updated_OI, kept_OI)
