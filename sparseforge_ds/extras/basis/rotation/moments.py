"""Second moments of inputs and of output gradients, from which a weight's score follows in any basis.

The mean over tokens of g_i^2 x_j^2 is the diagonal of the Fisher information of W_ij, where g is the gradient at an
output for labels that the model draws itself. Here it is approximated by the product of the means of g_i^2 and x_j^2. A
vector that will be rotated needs the whole matrix of its moments M: rotated, it has the diagonal of R^T M R.

Legend of shape suffixes: T tokens, S rows sorted by expert, E experts (1 of a weight that is not fused), C channels of
a side of a weight, P copies of a dimension along an axis, B its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from sparseforge_ds.extras.basis.permutation.channels import Axis
from sparseforge_ds.extras.basis.rotation.stream import RESIDUAL, Stream
from sparseforge_ds.extras.basis.rotation.transform import Rotations
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.zero.expert_hooks import expert_tokens, why_unhookable
from sparseforge_ds.zero.layer_hooks import token_gradients


@dataclass
class Side:
    """Moments of a weight's inputs, or of the gradients of its outputs, summed over tokens."""

    dimension: str | None
    """Dimension of the model that the side has, if it can be rotated."""
    axis: Axis | None
    square_EC: Tensor
    """Sums of squares; (E, 1) their total if the side has the residual stream."""
    stream_CC: Tensor | None = None
    """Moments of the residual stream, shared by weights; `square_EC` holds this side's own scale."""
    heads_PBCC: Tensor | None = None
    """Moments of the values of heads."""

    def diagonal(self, rotations: Rotations) -> Tensor:
        """Return the (E, C) sums of squares of the rotated channels."""
        # The residual stream: the diagonal of R^T M R, at this side's scale.
        if self.stream_CC is not None:
            rotation_CC = rotations[RESIDUAL][0]
            rotated_C = ((self.stream_CC @ rotation_CC) * rotation_CC).sum(0)
            return self.square_EC * rotated_C / self.stream_CC.trace().clamp(min=torch.finfo(torch.float32).tiny)
        if self.heads_PBCC is None:
            return self.square_EC
        # Values of heads: the same for every copy and block; other positions of the axis stay.
        assert self.dimension is not None and self.axis is not None
        rotation_BCC = rotations[self.dimension]
        rotated_PBC = ((self.heads_PBCC @ rotation_BCC) * rotation_BCC).sum(-2)
        result_EC = self.square_EC.clone()
        result_EC[0, self.axis.positions.to(result_EC.device)] = rotated_PBC
        return result_EC


@dataclass
class ScoredWeight:
    """A weight to prune, with the moments that its score follows from."""

    weight: PrunableWeight
    inputs: Side
    outputs: Side


@torch.enable_grad()
def measure_moments(
    model: PreTrainedModel, stream: Stream, weights: Iterable[PrunableWeight], batches: Iterable[Tensor], seed: int
) -> list[ScoredWeight]:
    """Measure the moments of weights by a forward and a backward pass for each batch of (B, S) token ids.

    Raises:
        ValueError: the inputs and gradients of experts cannot be observed, or those of a weight are not finite.
    """
    sums = _Sums(model, stream, list(weights))
    generator = torch.Generator(model.device).manual_seed(seed)
    # Only gradients of outputs are needed, none of parameters.
    training = model.training
    trained = [p for p in model.parameters() if p.requires_grad]
    model.eval().requires_grad_(False)
    with ExitStack() as stack:
        for name in stream.gains:
            stack.enter_context(model.get_submodule(name).register_forward_hook(partial(sums.on_norm, name)))
        stack.enter_context(token_gradients(sums.modules, sums.on_layer))
        stack.enter_context(expert_tokens(sums.fused, sums.on_experts))
        for batch_BS in tqdm(batches, unit=" passes", disable=None):
            logits_TV = model(input_ids=batch_BS.to(model.device), use_cache=False).logits.flatten(0, 1).float()
            label_T = torch.multinomial(logits_TV.detach().softmax(-1), 1, generator=generator)[:, 0]
            F.cross_entropy(logits_TV, label_T, reduction="sum").backward()
    model.train(training)
    for parameter in trained:
        parameter.requires_grad_()
    return sums.scored()


class _Sums:
    """Sums over the tokens of a model's passes; its `on_...` methods are the hooks."""

    def __init__(self, model: PreTrainedModel, stream: Stream, weights: list[PrunableWeight]) -> None:
        self._weights = {weight.name: weight for weight in weights}
        self._gains = stream.gains
        self._norm_of = stream.norm_of
        self.modules: dict[str, nn.Module] = {}
        self.fused: dict[str, nn.Module] = {}
        self._norm_moments: dict[str, Tensor] = {}
        self._block_moments: dict[str, Tensor] = {}
        self._sides: dict[str, tuple[Side, Side]] = {}
        self._tokens: dict[str, Tensor] = {}
        self._positions = 0  # tokens, summed over norms
        for weight in weights:
            # A layer has one hook; fused experts have one in their forward.
            module = model.get_submodule(weight.module)
            if len(weight.shape) == 2:
                self.modules[weight.name] = module
            elif (why := why_unhookable(module)) is None:
                self.fused[weight.module] = module
            else:
                raise ValueError(
                    f"rotate: the outputs of {weight.name} cannot be observed: it {why}; exclude or permute it"
                )
            # Empty sums of both sides.
            axes = {axis.axis: (name, axis) for name, axis in stream.axes(weight.name)}
            sides = [self._side(weight, side, axes.get(side), model.device) for side in matrix_axes(weight)]
            self._sides[weight.name] = (sides[0], sides[1])
            experts = weight.shape[0] if len(weight.shape) == 3 else 1
            self._tokens[weight.name] = torch.zeros(experts, device=model.device)

    def _side(self, weight: PrunableWeight, side: int, rotated: tuple[str, Axis] | None, device: torch.device) -> Side:
        """Make the empty sums of one side of a weight; `rotated` is its dimension and axis, if it can be rotated."""
        dimension, axis = rotated if rotated is not None else (None, None)
        experts = weight.shape[0] if len(weight.shape) == 3 else 1
        C = weight.shape[side]
        if dimension == RESIDUAL:
            # Readers share the moments of their norm; weights that a block adds to the stream share their gradients'.
            zeros_CC = torch.zeros(C, C, device=device)
            if weight.name in self._norm_of:
                stream_CC = self._norm_moments.setdefault(self._norm_of[weight.name], zeros_CC)
            else:
                stream_CC = self._block_moments.setdefault(block_name(weight.name), zeros_CC)
            return Side(dimension, axis, torch.zeros(experts, 1, device=device), stream_CC)
        square_EC = torch.zeros(experts, C, device=device)
        if axis is None:
            return Side(dimension, axis, square_EC)
        P, B, heads = axis.positions.shape
        return Side(dimension, axis, square_EC, heads_PBCC=torch.zeros(P, B, heads, heads, device=device))

    def on_norm(self, name: str, _module: nn.Module, _args: object, output: Tensor) -> None:
        """Add a norm's outputs, divided by the gains that will move into the layers."""
        if name in self._norm_moments:
            output_TC = output.detach().reshape(-1, output.shape[-1])
            gain_C = self._gains[name]
            plain_TC = torch.where(gain_C == 0, 0.0, output_TC.float() / gain_C)
            self._norm_moments[name].addmm_(plain_TC.T, plain_TC)
            self._positions += len(output_TC)

    def on_layer(self, name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
        """Add the inputs and output gradients of a layer."""
        inputs, outputs = self._sides[name]
        self._tokens[name] += len(input_TI)
        for side, value_TC in ((inputs, input_TI.float()), (outputs, grad_TO.float())):
            self._add_stream_moments(side, value_TC)
            if side.stream_CC is None:
                side.square_EC[0] += value_TC.square().sum(0)
            else:
                side.square_EC += value_TC.square().sum()
            if side.heads_PBCC is not None:
                assert side.axis is not None
                head_TPBC = value_TC[:, side.axis.positions.to(value_TC.device)]
                side.heads_PBCC += torch.einsum("tpbi,tpbj->pbij", head_TPBC, head_TPBC)

    def on_experts(
        self, layer: str, parameter: str, grad_SO: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
    ) -> None:
        """Add the inputs and output gradients of fused experts, whose rows are sorted by expert."""
        name = f"{layer}.{parameter}"
        if name not in self._sides:
            return
        assert grad_SO is not None
        row_S = torch.arange(len(input_SI), device=stop_E.device, dtype=stop_E.dtype)
        expert_S = torch.searchsorted(stop_E, row_S, right=True)
        self._tokens[name] += torch.bincount(expert_S, minlength=len(stop_E))
        for side, value_SC in zip(self._sides[name], (input_SI.float(), grad_SO.float()), strict=True):
            self._add_stream_moments(side, value_SC)
            square_SC = value_SC.square()
            if side.stream_CC is not None:
                square_SC = square_SC.sum(1, keepdim=True)
            side.square_EC.index_add_(0, expert_S, square_SC)

    def _add_stream_moments(self, side: Side, value_TC: Tensor) -> None:
        """Add to the stream's moments, except where `on_norm` does."""
        if side.stream_CC is not None and not any(side.stream_CC is sums for sums in self._norm_moments.values()):
            side.stream_CC.addmm_(value_TC.T, value_TC)

    def scored(self) -> list[ScoredWeight]:
        """Return all weights: inputs as means over the tokens of a weight, gradients as sums over all tokens.

        Raises:
            ValueError: a sum is not finite.
        """
        for name, (inputs, outputs) in self._sides.items():
            if not all(side.square_EC.isfinite().all() for side in (inputs, outputs)):
                raise ValueError(
                    f"rotate: the inputs of {name}, or the gradients of its outputs, are not finite; store a float16 "
                    "model in bfloat16 or float32, or give another one"
                )
            count_E1 = self._tokens[name].clamp(min=1)[:, None]
            if inputs.stream_CC is None:
                inputs.square_EC /= count_E1
            else:
                inputs.square_EC.fill_(inputs.stream_CC.trace() * len(self._norm_moments) / self._positions)
            if inputs.heads_PBCC is not None:
                inputs.heads_PBCC /= count_E1[0]
        return [ScoredWeight(weight, *self._sides[name]) for name, weight in self._weights.items()]


def matrix_axes(weight: PrunableWeight) -> tuple[int, int]:
    """Return the axes of inputs and of outputs, as negative numbers."""
    return weight.input_axis, -3 - weight.input_axis


def block_name(weight: str) -> str:
    """Return the module that adds a weight's outputs to the residual stream, the one below the number: `h.3.attn`."""
    parts = weight.split(".")
    number = next(index for index, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[: number + 2])
